"""What docs/library.md builds routes as our models do, for every variant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.routing import (
  build_schedule,
  DepthRouter,
  DepthState,
  RoutingConfig,
  VARIANTS,
)
from tests.docs.test_code import PYTHON

LINEN, NNX = PYTHON["docs/library.md"]


def definitions(block, until, routing):
  """What a block defines before a line, with another routing config."""
  names = {"__name__": "page"}
  exec(block[: block.index(until)], names)
  names["routing"] = routing
  return names


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_linen_model_has_every_variant(variant):
  routing = RoutingConfig(variant=variant, num_blocks=2)
  names = definitions(LINEN, "tokens =", routing)
  tokens = jnp.zeros((2, 8), jnp.int32)
  variables = jax.eval_shape(names["Model"]().init, jax.random.key(0), tokens)
  assert routing.row.learned == ("'key_norm'" in str(variables))
  logits = jax.eval_shape(names["Model"]().apply, variables, tokens)
  assert logits.shape == (2, 8, 256)


@pytest.mark.parametrize(
  "variant", ["attnres_block", "delta", "delta_block_released", "full_additive"]
)
def test_the_pure_read_is_that_of_the_router(variant):
  routing = RoutingConfig(variant=variant, num_blocks=2)
  names = definitions(NNX, "rngs =", routing)
  width, sublayer = names["WIDTH"], 2
  schedule = build_schedule(routing, 2)
  vectors = jax.random.normal(jax.random.key(0), (4, 2, 3, width))
  state = DepthState.create(vectors[0], schedule)
  appends = routing.row.appends
  for s in range(sublayer):
    step = schedule.step(s)
    state = state.advance(vectors[s + 1], step, appends).commit([step], appends)
  step = schedule.step(sublayer)
  query, key_norm = jax.random.normal(jax.random.key(1), (2, width))
  router = DepthRouter(routing, routing.row.roles, width, 1e-6)
  params = {"params": {"query": query[None], "key_norm": key_norm}}
  (expected,) = router.apply(params, state, step)
  found = names["read"](query * key_norm, state, step)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert not np.allclose(found, state.stream_BxTxD)
