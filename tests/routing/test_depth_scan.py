"""The scan that keeps one memory equals the plain scan."""

import functools

from flax import linen as nn
import jax
import jax.flatten_util
import numpy as np
import pytest

from deltajax.models.transformer import TransformerLM
from deltajax.routing import readers, router
from deltajax.routing.depth_scan import REMAT_POLICIES
from deltajax.routing.sharding import active_sharding, Sharding, use_sharding
from deltajax.routing.variants import VARIANTS
from deltajax.training.mesh import RULES
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
    dtype=dtype,
    param_dtype="float64" if dtype == "float64" else "float32",
    scan=scan,
    remat=remat,
    **{"num_blocks": 2, **dict(options)},
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


def both_scans(variant, remat="full", dtype="float64", layers=5, **opts):
  options = tuple(sorted(opts.items()))
  plain = values_and_gradients("plain", variant, "none", dtype, layers, options)
  ours = values_and_gradients(
    "append_only", variant, remat, dtype, layers, options
  )
  return plain, ours


def relative_gaps(plain, ours):
  """How far each gradient is from the plain one, as a fraction of its norm."""
  return {
    jax.tree_util.keystr(path): float(np.linalg.norm(a - b) / np.linalg.norm(a))
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(plain[2]),
      jax.tree.leaves(ours[2]),
      strict=True,
    )
    if a.any()
  }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant):
  plain, ours = both_scans(variant)
  for a, b in zip(plain[:2], ours[:2], strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize(
  "variant", ["delta_block", "rd_attnres", "delta", "full_replace"]
)
def test_every_remat_policy(variant, remat):
  plain, ours = both_scans(variant, remat)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize(
  ("variant", "options"),
  [
    ("delta_block", {"gate": "scalar"}),
    ("delta", {"gate": "sigmoid", "null_source": True}),
    ("delta_block_released", {"null_source": True, "heads": 2}),
    ("attnres_block", {"heads": 4, "key_dim": 8}),
    ("rd_delta_block", {"heads": 2, "key_dim": 8, "null_source": True}),
    ("rd_attnres", {"null_source": True}),
    ("delta_block", {"num_blocks": 5}),
    ("attnres_block", {"num_blocks": 1}),
  ],
)
def test_options(variant, options):
  plain, ours = both_scans(variant, **options)
  np.testing.assert_allclose(ours[0], plain[0], rtol=1e-12, atol=1e-12)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize(
  ("variant", "group", "options"),
  [
    ("delta", 3, {"gate": "sigmoid", "null_source": True, "heads": 2}),
    ("delta", 6, {"key_dim": 8}),
    ("attnres_full", 3, {"heads": 2, "key_dim": 8, "null_source": True}),
    ("rd_delta", 3, {}),
    ("delta_replace", 2, {}),
    ("full_replace", 3, {"null_source": True}),
  ],
)
def test_layers_that_read_together(variant, group, options):
  plain, ours = both_scans(variant, layers=6, read_group=group, **options)
  for a, b in zip(plain[:2], ours[:2], strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_groups_under_every_remat_policy(remat):
  plain, ours = both_scans("delta", remat, layers=6, read_group=3)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


def assert_equal_but_for_rounding(exact, plain, ours):
  """Gradients differ by 1e-5, or as rounding alone does in the plain scan.

  Both roundings are as good as random, and not the same on every machine:
  hence norms, and a factor. That the gradients are equal, float64 shows.
  """
  np.testing.assert_allclose(ours[0], plain[0], rtol=1e-5, atol=1e-5)
  gaps, rounding = relative_gaps(plain, ours), relative_gaps(exact, plain)
  for name, gap in gaps.items():
    assert gap < max(1e-5, 3 * rounding[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(variant):
  exact, _ = both_scans(variant)
  assert_equal_but_for_rounding(exact, *both_scans(variant, dtype="float32"))


@pytest.mark.parametrize("variant", ["delta", "attnres_full"])
def test_groups_in_float32(variant):
  exact, _ = both_scans(variant, layers=6, read_group=3)
  assert_equal_but_for_rounding(
    exact, *both_scans(variant, dtype="float32", layers=6, read_group=3)
  )


@pytest.mark.parametrize(
  ("variant", "group", "kernel"),
  [("delta", 3, "interpret"), ("attnres_full", 2, "interpret_triton")],
)
def test_groups_read_by_a_kernel(variant, group, kernel):
  exact, _ = both_scans(variant, layers=6)
  plain, _ = both_scans(variant, layers=6, dtype="float32")
  _, ours = both_scans(
    variant,
    layers=6,
    dtype="float32",
    read_group=group,
    depth_attention=kernel,
  )
  assert_equal_but_for_rounding(exact, plain, ours)


@pytest.mark.parametrize(
  ("variant", "options"),
  [
    ("delta_block", {}),
    ("delta", {}),
    ("rd_attnres", {}),
    ("delta", {"layers": 6, "read_group": 3}),
  ],
)
def test_bfloat16_is_as_near_to_float32_as_the_plain_scan(variant, options):
  exact, _ = both_scans(variant, dtype="float32", **options)
  plain, ours = both_scans(variant, dtype="bfloat16", **options)

  def distance(gradients):
    flat, _ = jax.flatten_util.ravel_pytree(gradients)
    expected, _ = jax.flatten_util.ravel_pytree(exact[2])
    return float(np.linalg.norm(flat - expected) / np.linalg.norm(expected))

  assert distance(ours[2]) < 1.5 * distance(plain[2])


def test_the_backward_pass_is_traced_for_the_same_mesh(monkeypatch):
  """It is traced when the forward pass has been left."""
  seen = []

  def case_of(*args):
    seen.append(active_sharding())
    return readers.case_of(*args)

  config = tiny_config(
    "delta_block",
    num_layers=2,
    num_blocks=2,
    dtype="float32",
    param_dtype="float32",
  )
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
  sharding = Sharding(mesh, dict.fromkeys(RULES, None))
  params = random_params(config)
  monkeypatch.setattr(router, "case_of", case_of)

  def loss(params):
    with use_sharding(sharding):
      output = TransformerLM(config).apply(
        {"params": params}, random_tokens(config)
      )
    return output.logits_BxTxV.sum()

  jax.eval_shape(jax.grad(loss), params)
  assert len(seen) == 2
  assert all(x is sharding for x in seen)


def test_a_scan_of_one_layer():
  plain, ours = both_scans("delta_block", layers=1, num_blocks=1)
  assert max(relative_gaps(plain, ours).values()) < 1e-9


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("variant", ["delta", "full_additive", "delta_block"])
def test_memory_grows_with_depth_not_its_square(variant, remat):
  def temporaries(scan, layers):
    config = tiny_config(
      variant,
      num_layers=layers,
      num_blocks=4,
      width=32,
      dtype="float32",
      param_dtype="float32",
      remat=remat,
      scan=scan,
    )
    model = TransformerLM(config)
    tokens = np.zeros((4, 64), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params):
      return model.apply({"params": params}, tokens).logits_BxTxV.sum()

    compiled = jax.jit(jax.grad(loss)).lower(nn.meta.unbox(params)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  ours = temporaries("append_only", 64) / temporaries("append_only", 32)
  assert ours < 2.1
  if (variant, remat) == ("delta", "full"):
    plain = temporaries("plain", 64) / temporaries("plain", 32)
    assert plain > 3  # the measure can see the square


@pytest.mark.parametrize(
  ("remat", "group"), [("none", 1), ("full", 1), ("dots", 3)]
)
def test_parameters_are_not_saved_for_each_layer(remat, group):
  """They are there in any case; here all else is small beside them."""
  config = tiny_config(
    "delta",
    num_layers=12,
    width=32,
    mlp_width=2048,
    dtype="float32",
    param_dtype="float32",
    remat=remat,
    read_group=group,
  )
  tokens = np.zeros((1, 4), np.int32)
  model = TransformerLM(config)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  params = nn.meta.unbox(params)

  def loss(params):
    return model.apply({"params": params}, tokens).logits_BxTxV.sum()

  compiled = jax.jit(jax.grad(loss)).lower(params).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  of_params = sum(4 * x.size for x in jax.tree.leaves(params))
  assert temporaries < 0.75 * of_params
