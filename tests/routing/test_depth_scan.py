"""The scan that keeps one memory equals the plain scan."""

import functools

import jax
import numpy as np
import pytest

from deltajax.models.transformer import TransformerLM
from deltajax.routing.depth_scan import REMAT_POLICIES
from deltajax.routing.variants import VARIANTS
from tests.helpers import (
  precision,
  quick_jit,
  random_params,
  random_tokens,
  tiny_config,
)

SEGMENTS = np.array([[1] * 4 + [2] * 5, [1] * 9], np.int32)
POSITIONS = np.array([[*range(4), *range(5)], [*range(9)]], np.int32)


@functools.cache
def values_and_gradients(scan, variant, remat, dtype, num_layers, options):
  config = tiny_config(
    variant,
    num_layers=num_layers,
    num_blocks=2,
    dtype=dtype,
    param_dtype="float64" if dtype == "float64" else "float32",
    scan=scan,
    remat=remat,
    **dict(options),
  )
  model = TransformerLM(config)
  params = random_params(config)
  tokens = random_tokens(config)

  def loss(params):
    logits = model.apply(
      {"params": params}, tokens, segment_ids=SEGMENTS, positions=POSITIONS
    ).logits_BxTxV
    return (jax.numpy.sin(logits) ** 2).mean(), logits

  with precision(dtype):
    (_, logits), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(
      params
    )
    _, forward = quick_jit(loss)(params)
  return np.asarray(forward), np.asarray(logits), jax.device_get(grads)


def assert_equal_scans(
  variant, remat="full", dtype="float64", layers=5, **opts
):
  options = tuple(sorted(opts.items()))
  plain = values_and_gradients("plain", variant, "none", dtype, layers, options)
  ours = values_and_gradients(
    "append_only", variant, remat, dtype, layers, options
  )
  return plain, ours


def relative_gaps(plain, ours):
  return {
    jax.tree_util.keystr(path): float(
      np.abs(a - b).max() / (np.abs(a).max() + 1e-30)
    )
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(plain[2]),
      jax.tree.leaves(ours[2]),
      strict=True,
    )
    if np.abs(a).max() > 0
  }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant):
  plain, ours = assert_equal_scans(variant)
  for a, b in zip(plain[:2], ours[:2], strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("variant", ["delta_block", "rd_attnres", "delta"])
def test_every_remat_policy(variant, remat):
  plain, ours = assert_equal_scans(variant, remat)
  assert max(relative_gaps(plain, ours).values()) < 1e-9
