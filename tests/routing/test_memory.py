"""What is stored, and when."""

import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.routing import (
  build_schedule,
  ConfigError,
  DepthState,
  RoutingConfig,
)


def test_what_is_appended_has_a_name():
  schedule = build_schedule(RoutingConfig(variant="delta"), num_layers=1)
  state = DepthState.create(jnp.ones((1, 1, 2)), schedule)
  step = schedule.step(0)
  for call in (
    lambda: state.advance(jnp.ones((1, 1, 2)), step, "detla"),
    lambda: state.commit([step], "detla"),
  ):
    with pytest.raises(ConfigError, match=r"'detla'.*did you mean 'delta'"):
      call()


def after_a_layer(variant, commits):
  """The memory after a layer of outputs 2 and 3 on an embedding of 1.

  Args:
    variant: of the routing, in two layers and two blocks.
    commits: sublayers after which the state commits.
  """
  routing = RoutingConfig(variant=variant, num_blocks=2)
  row, schedule = routing.row, build_schedule(routing, 2)
  state = DepthState.create(jnp.ones((1, 1, 1)), schedule)
  since = []
  for s, appends in enumerate((row.attention_appends, row.appends)):
    since.append(schedule.step(s))
    output_BxTxD = jnp.full((1, 1, 1), 2.0 + s)
    state = state.advance(output_BxTxD, since[-1], appends)
    if s in commits:
      state, since = state.commit(since, row.appends), []
  return state.memory.slots_SxBxTxD.ravel()


@pytest.mark.parametrize("commits", [(0, 1), (1,)], ids=["each", "both"])
@pytest.mark.parametrize(
  "variant, stored",
  [
    ("standard", []),
    ("delta", [1, 2, 3, 0]),
    ("delta_block", [1, 5]),
    ("delta_block_released", [1, 5]),
    ("full_additive", [3, 6, 0]),
  ],
)
def test_a_commit_stores_what_was_left_since_the_last(variant, stored, commits):
  np.testing.assert_array_equal(after_a_layer(variant, commits), stored)


def test_a_commit_needs_the_steps_of_all_that_was_left():
  routing = RoutingConfig(variant="delta")
  schedule = build_schedule(routing, 2)
  state = DepthState.create(jnp.ones((1, 1, 1)), schedule)
  for s in range(2):
    state = state.advance(state.stream_BxTxD, schedule.step(s), "delta")
  with pytest.raises(ValueError, match="shorter"):
    state.commit([schedule.step(1)], "delta")
