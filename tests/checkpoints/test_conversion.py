"""A standard model becomes a routed one, and not one logit changes."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.checkpoints.conversion import is_exact, probe
from deltajax.checkpoints.huggingface import load_pretrained
from deltajax.config import RoutingConfig
from deltajax.routing import VARIANTS
from tests.helpers import assert_trees_equal, with_params

MODEL = (
  pathlib.Path(__file__).parents[1]
  / "testdata"
  / "huggingface"
  / "llama-untied"
)
ADDITIVE = [
  name
  for name, row in VARIANTS.items()
  if row.additive and (row.learned or row.embedding_source)
]


def converted(variant, gate="scalar", **options):
  routing = RoutingConfig(variant=variant, gate=gate, num_blocks=3, **options)
  return load_pretrained(MODEL, routing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", ADDITIVE)
def test_a_scalar_gate_changes_no_bit(variant, dtype):
  model = converted(variant)
  assert is_exact(model.config.routing)
  found = probe(*model, dtype=dtype)
  assert found.equal
  assert found.difference == 0
  assert found.size > 0.5
  assert str(found).startswith(f"{dtype}: equal bit for bit")


def test_the_probe_sees_a_difference():
  config, params = converted("rd_delta_block")
  params = with_params(
    params,
    gate=lambda x: jnp.full_like(x, 0.1),
    query=lambda x: x + jnp.arange(x.shape[-1]),
  )
  found = probe(config, params, "float32")
  assert not found.equal
  assert found.difference > 1e-3
  assert "differ by up to" in str(found)


@pytest.mark.parametrize(
  "variant", ["delta", "delta_block", "rd_delta_block", "attnres_block"]
)
def test_zero_queries_change_little(variant):
  model = converted(variant, gate="none")
  assert not is_exact(model.config.routing)
  found = probe(*model, dtype="float32")
  assert 0 < found.difference < 1e-3 * found.size


@pytest.mark.parametrize(
  ("variant", "gate", "exact"),
  [
    ("delta_block", "sigmoid", False),
    ("embedding_skip", "none", False),
    ("embedding_skip_scaled", "none", True),
    ("attnres_full", "none", False),
    ("standard", "none", False),
  ],
)
def test_which_conversions_must_be_exact(variant, gate, exact):
  assert is_exact(RoutingConfig(variant=variant, gate=gate)) == exact


def test_routing_starts_as_in_a_new_model():
  config, params = converted("delta", null_source=True, query_init_std=0.5)
  router = params["layers"]["mlp_router"]
  assert 0.3 < np.std(router["query"]) < 0.7
  for name, value in (("gate", 0), ("key_norm", 1), ("null_source", 0)):
    assert (router[name] == value).all(), name
  base = load_pretrained(MODEL).params
  for name in ("attention", "mlp", "attention_norm"):
    assert_trees_equal(params["layers"][name], base["layers"][name])
  assert config.routing.variant == "delta"
