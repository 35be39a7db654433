"""Variants that compute the base model, and those that must not.

Where the visible sources add up to the stream, zero queries give a multiple of
the stream, which RMSNorm does not see (exactly so for eps = 0).
"""

import functools

from flax import traverse_util
import jax
import numpy as np
import pytest

from deltajax.models.transformer import TransformerLM
from deltajax.routing import VARIANTS
from tests.helpers import (
  assert_trees_close,
  logits_of,
  precision,
  quick_jit,
  random_params,
  random_tokens,
  relative_error,
  tiny_config,
  with_params,
  zero_queries,
)

SUM_TO_THE_STREAM = [
  "attnres_full",
  "attnres_block",
  "delta",
  "delta_block",
  "rd_attnres",
  "rd_delta",
  "rd_delta_block",
  "rd_tied",
  "rd_average",
  "rd_frozen_v",
]
ADDITIVE = [
  "delta",
  "delta_block",
  "delta_block_closed",
  "delta_block_released",
  "rd_delta",
  "rd_delta_block",
  "full_additive",
  "embedding_skip",
  "embedding_skip_scaled",
]


def logits(variant, edit=lambda params: params, **options):
  config = tiny_config(variant, norm_eps=0.0, **options)
  params = edit(random_params(config))
  return logits_of(config, params, random_tokens(config))


@pytest.mark.parametrize("variant", SUM_TO_THE_STREAM)
def test_zero_queries_are_the_standard_model(variant):
  actual = logits(variant, zero_queries)
  assert relative_error(actual, logits("standard")) < 1e-12


@pytest.mark.parametrize(
  "variant, options",
  [
    ("attnres_block", {"heads": 2}),
    ("rd_delta_block", {"heads": 4, "key_dim": 8}),
    ("rd_attnres", {"num_layers": 5, "num_blocks": 2}),
  ],
)
def test_zero_queries_are_the_standard_model_for_all_options(variant, options):
  actual = logits(variant, zero_queries, **options)
  expected = logits("standard", num_layers=options.get("num_layers", 6))
  assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize(
  "variant",
  [
    "delta_block_closed",
    "delta_block_released",
    "embedding_skip",
    "full_additive",
    "delta_replace",
    "full_replace",
  ],
)
def test_other_sums_are_not_the_standard_model(variant):
  actual = logits(variant, zero_queries)
  assert relative_error(actual, logits("standard")) > 0.05


@pytest.mark.parametrize("variant", SUM_TO_THE_STREAM)
def test_queries_that_are_not_zero_change_the_model(variant):
  assert relative_error(logits(variant), logits("standard")) > 0.05


@pytest.mark.smoke
def test_float32_with_eps_starts_close_to_the_standard_model():
  options = {"dtype": "float32", "param_dtype": "float32"}
  config = tiny_config("delta_block", **options)
  tokens = random_tokens(config)
  params = zero_queries(random_params(config))
  standard = tiny_config("standard", **options)
  expected = logits_of(standard, random_params(standard), tokens)
  assert relative_error(logits_of(config, params, tokens), expected) < 1e-4


def test_tied_roles_are_the_parent():
  """Values and gradients, with queries that are not zero."""
  found = []
  for variant in ("rd_tied", "attnres_block"):
    config = tiny_config(variant)
    model = TransformerLM(config)
    params, tokens = random_params(config), random_tokens(config)

    def loss(params, model=model, tokens=tokens):
      out = model.apply({"params": params}, tokens).logits_BxTxV
      return jax.nn.log_softmax(out)[..., 0].mean(), out

    with precision("float64"):
      (_, out), gradients = quick_jit(jax.value_and_grad(loss, has_aux=True))(
        params
      )
    found.append((np.asarray(out), jax.tree.map(np.asarray, gradients)))
  (tied, d_tied), (parent, d_parent) = found
  assert relative_error(tied, parent) < 1e-12
  assert np.abs(d_parent["layers"]["attention_router"]["query"]).max() > 0
  assert_trees_close(d_tied, d_parent, 1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", ADDITIVE)
def test_a_closed_scalar_gate_is_the_standard_model_bit_for_bit(variant, dtype):
  """What conversion of pretrained checkpoints rests on."""
  options = {"dtype": dtype, "param_dtype": "float32"}
  config = tiny_config(variant, gate="scalar", **options)
  # Only the gate protects: queries, key norms and null sources are random.
  params = with_params(random_params(config), gate=np.zeros_like)
  standard = tiny_config("standard", **options)
  tokens = random_tokens(config)
  expected = plain_logits(standard, random_params(standard), tokens)
  actual = plain_logits(config, params, tokens)
  np.testing.assert_array_equal(actual, expected)
  opened = with_params(params, gate=np.ones_like)
  assert relative_error(plain_logits(config, opened, tokens), expected) > 0.05


@pytest.mark.parametrize(
  "variant", [name for name in VARIANTS if name.startswith("rd_")]
)
def test_the_v_route_is_read(variant):
  config = tiny_config(variant)
  params, tokens = random_params(config), random_tokens(config)
  query = params["layers"]["attention_router"]["query"]
  learned = 1 if variant in ("rd_tied", "rd_frozen_v") else 2
  assert query.shape == (config.num_layers, learned, config.width)
  assert params["layers"]["mlp_router"]["query"].shape[1] == 1
  before = logits_of(config, params, tokens)
  for route in range(learned):
    moved = query.copy()
    moved[:, route] += 1
    router = {**params["layers"]["attention_router"], "query": moved}
    layers = {**params["layers"], "attention_router": router}
    after = logits_of(config, {**params, "layers": layers}, tokens)
    assert relative_error(after, before) > 1e-3, route


def test_embedding_skip_is_one_closed_block():
  actual = logits("embedding_skip")
  assert (
    relative_error(actual, logits("delta_block_closed", num_blocks=1)) < 1e-12
  )


def test_embedding_skip_has_no_routing_parameters():
  skip = traverse_util.flatten_dict(
    random_params(tiny_config("embedding_skip"))
  )
  standard = traverse_util.flatten_dict(random_params(tiny_config("standard")))
  assert skip.keys() == standard.keys()


@functools.cache
def optimised(config):
  """Compiled as for users, whose bits depend on it; float32 without fusion.

  In float32 a compiler may add the stream inside of the product that makes an
  output, where nothing else wants that output: it then rounds otherwise.
  """
  model = TransformerLM(config)
  jit = quick_jit if config.dtype == "float32" else jax.jit
  return jit(lambda params, tokens: model.apply({"params": params}, tokens))


def plain_logits(config, params, tokens):
  return np.asarray(optimised(config)(params, tokens).logits_BxTxV)
