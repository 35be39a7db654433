"""One pass of several reads over the memory, by every implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.routing.depth_attention import depth_attention, READERS
from deltajax.routing.memory import DepthMemory, DepthState
from deltajax.routing.partial_read import MASKED, PartialRead, Single
from deltajax.routing.readers import case_of, read_slots
from deltajax.routing.router import DepthRouter, read_together
from deltajax.routing.schedule import build_schedule
from deltajax.routing.streaming import merge
from deltajax.routing.validation import ConfigError
from deltajax.routing.variants import RoutingConfig
from tests.helpers import precision

EPS = 1e-6
S, B, T, D, R = 5, 2, 3, 12, 3


def arrays(seed=0, heads=1, key_size=D):
  rng = np.random.default_rng(seed)
  normal = rng.standard_normal
  queries, slots = normal((R, key_size)), normal((S, B, T, D))
  cotangents = (
    PartialRead(normal((R, B, T, D)), normal((R, heads, B, T))),
    normal((S, B, T, D)),
  )
  return jax.tree.map(jnp.asarray, (queries, slots, cotangents))


def read_memory(name, queries, slots, visible, heads=1):
  return read_slots(
    READERS[name],
    queries,
    slots,
    jnp.array(visible, jnp.int32),
    case_of(queries, slots, heads, EPS),
  )


def read_and_gradients(name, visible, heads=1, key_size=D):
  queries, slots, cotangents = arrays(heads=heads, key_size=key_size)
  out, pull = jax.vjp(
    lambda q, x: read_memory(name, q, x, visible, heads),
    queries,
    slots,
  )
  return out, pull(cotangents)


# Kernels have tests of their own: they compute in float32.
FLOAT64 = ("xla", "reference")


@pytest.mark.parametrize(
  ("visible", "heads", "key_size"),
  [
    ((5, 5, 5), 1, D),
    ((0, 2, 5), 1, D),
    ((3, 0, 1), 3, D),
    ((0, 0, 0), 1, D),
    ((4, 5, 2), 2, 6),
  ],
)
def test_xla_equals_the_reference(visible, heads, key_size):
  """Reads that see different slots, and gradients of their log-sum-exp."""
  with precision("float64"):
    expected = read_and_gradients("reference", visible, heads, key_size)
    found = read_and_gradients("xla", visible, heads, key_size)
    chex.assert_trees_all_close(found, expected, rtol=1e-11, atol=1e-11)
    read = found[0][0]
    for r in np.flatnonzero(np.array(visible) == 0):
      np.testing.assert_array_equal(read.lse_RxHxBxT[r], MASKED)
      np.testing.assert_array_equal(read.mix_RxBxTxD[r], 0)


@pytest.mark.parametrize("name", FLOAT64)
def test_the_gradient_of_the_memory_runs_through_the_read(name):
  """What later readers want of the memory, and what the read adds to it."""
  with precision("float64"):
    queries, slots, cotangents = arrays()

    def gradient(d_slots):
      _, pull = jax.vjp(
        lambda x: read_memory(name, queries, x, [2, 4, 3]),
        slots,
      )
      return pull((cotangents[0], d_slots))[0]

    alone = gradient(jnp.zeros_like(slots))
    np.testing.assert_array_equal(alone[4:], 0)
    np.testing.assert_allclose(
      gradient(cotangents[1]), alone + cotangents[1], rtol=1e-12
    )


def test_merging_parts_is_reading_all():
  """However sources are split between the memory and the others."""
  with precision("float64"):
    queries, slots, _ = arrays()
    whole, _ = read_memory("xla", queries, slots, [S] * R)
    for stored in range(S + 1):
      part, _ = read_memory("xla", queries, slots, [stored] * R)
      singles = tuple(Single(x, True) for x in slots[stored:])
      mixed = merge(queries, part, singles, 1, EPS)
      np.testing.assert_allclose(mixed, whole.mix_RxBxTxD, rtol=1e-12)
    every = tuple(Single(x, True) for x in slots)
    alone = merge(queries, None, every, 1, EPS)
    np.testing.assert_allclose(alone, whole.mix_RxBxTxD, rtol=1e-12)


@pytest.mark.parametrize("variant", ["delta", "rd_delta_block", "attnres_full"])
def test_sublayers_that_read_together_read_what_they_would_alone(variant):
  routing = RoutingConfig(variant=variant, num_blocks=2, query_init_std=1.0)
  schedule = build_schedule(routing, 4)
  row = routing.row
  rng = np.random.default_rng(0)
  with precision("float64"):
    state = DepthState.create(
      jnp.asarray(rng.standard_normal((B, T, D))), schedule
    )
    state = DepthState(
      memory=DepthMemory(
        jnp.asarray(rng.standard_normal(state.memory.slots_SxBxTxD.shape))
      ),
      stream_BxTxD=state.stream_BxTxD,
      running_BxTxD=jnp.asarray(rng.standard_normal((B, T, D))),
    )
    steps = [schedule.step(4), schedule.step(5)]
    routers = []
    for i, roles in enumerate((row.roles, row.single_role)):
      router = DepthRouter(routing, roles, D, EPS, param_dtype="float64")
      params = router.init(jax.random.key(i), state, steps[0])
      routers.append(router.bind(params))
    reads, after = read_together(routers, state, steps)
    for router, step, read in zip(routers, steps, reads, strict=True):
      # Beside the definition, to which what is recent is one more slot.
      memory = state.memory
      for source in state.recent:
        memory = memory.append(source, step.stored, jnp.bool_(True))
      expected = depth_attention(
        router.queries(),
        memory.slots_SxBxTxD,
        visible=step.visible,
        running_BxTxD=state.running_BxTxD,
        running_visible=step.reads_running,
        stream_BxTxD=state.stream_BxTxD if row.additive else None,
        eps=EPS,
        implementation="reference",
      )
      np.testing.assert_allclose(
        router(state, step), expected, rtol=1e-12, atol=1e-14
      )
      np.testing.assert_allclose(
        router(after, step, read), expected, rtol=1e-12, atol=1e-14
      )
      delta = jnp.asarray(rng.standard_normal((B, T, D)))
      state = state.advance(delta, step, row.attention_appends)
      after = after.advance(delta, step, row.attention_appends)


def test_a_commit_at_the_wrong_place_raises():
  routing = RoutingConfig(variant="delta")
  schedule = build_schedule(routing, 2)
  state = DepthState.create(jnp.ones((B, T, D)), schedule)
  router = DepthRouter(routing, routing.row.single_role, D, EPS)
  params = router.init(jax.random.key(0), state, schedule.step(0))
  first, second = schedule.step(0), schedule.step(1)
  state = state.advance(jnp.ones((B, T, D)), first, "delta")
  router.apply(params, state, second)
  too_early = state.commit([first], "delta")
  with pytest.raises(ConfigError, match=r"0 sources are recent .* has 1"):
    router.apply(params, too_early, second)
  never = state.advance(jnp.ones((B, T, D)), second, "delta")
  with pytest.raises(ConfigError, match=r"2 sources are recent .* has 0"):
    router.apply(params, never, schedule.step(2))


@pytest.mark.parametrize("less_newest", [False, True])
@pytest.mark.parametrize("when", [False, True])
def test_appending_and_its_gradient(when, less_newest):
  rng = np.random.default_rng(0)
  with precision("float64"):
    slots = jnp.asarray(rng.standard_normal((S, B, T, D))).at[3:].set(0)
    source = jnp.asarray(rng.standard_normal((B, T, D)))

    def plain(slots, source):
      new = source - slots[2] if less_newest else source
      return slots.at[3].set(new) if when else slots

    def ours(slots, source):
      return (
        DepthMemory(slots)
        .append(source, jnp.int32(3), jnp.bool_(when), less_newest)
        .slots_SxBxTxD
      )

    expected, plain_pull = jax.vjp(plain, slots, source)
    found, pull = jax.vjp(ours, slots, source)
    np.testing.assert_array_equal(found, expected)
    cotangent = jnp.asarray(rng.standard_normal(slots.shape))
    d_slots, d_source = plain_pull(cotangent)
    d_slots_ours, d_source_ours = pull(cotangent)
    np.testing.assert_array_equal(d_source_ours, d_source)
    # All but the slot itself, whose former content nobody has read.
    others = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(d_slots_ours[others], d_slots[others])
