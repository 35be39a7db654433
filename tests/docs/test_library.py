"""What docs/library.md builds routes as our models do, for every variant."""

from flax import linen as nn, nnx
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
from tests.helpers import quick_jit

LINEN, THEIRS, ROUTED, NNX, EVERY = PYTHON["docs/library.md"]


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


def theirs():
  """The block of somebody else, and what routes it."""
  names = {"__name__": "page"}
  exec(THEIRS + ROUTED[: ROUTED.index("tokens =")], names)
  return names


def with_random_routers(variables):
  """Parameters in which every read has learned something."""
  flat = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(variables))
  leaves = [
    jax.random.normal(jax.random.key(i), x.shape)
    if "router" in str(path)
    else x
    for i, (path, x) in enumerate(flat[0])
  ]
  return jax.tree.unflatten(flat[1], leaves)


def by_hand(params, routing, embedded, mask, num_layers):
  """Their blocks with routing written out, from the parameters of `Routed`."""
  row, width = routing.row, embedded.shape[-1]
  schedule = build_schedule(routing, num_layers)
  state = DepthState.create(embedded, schedule)

  def read(s, step):
    router = DepthRouter(routing, row.single_role, width, 1e-6)
    own = {"params": params.get(f"router_{s}", {})}
    return router.apply(own, state, step)[0]

  for layer in range(num_layers):
    block = params[f"blocks_{layer}"]

    def of(module, name, *args, block=block, **kwargs):
      return module.apply({"params": block[name]}, *args, **kwargs)

    steps = [schedule.step(2 * layer), schedule.step(2 * layer + 1)]
    x = of(nn.LayerNorm(), "LayerNorm_0", read(2 * layer, steps[0]))
    attention = nn.MultiHeadDotProductAttention(num_heads=4)
    x = of(attention, "MultiHeadDotProductAttention_0", x, mask=mask)
    state = state.advance(x, steps[0], row.attention_appends)
    z = of(nn.LayerNorm(), "LayerNorm_1", read(2 * layer + 1, steps[1]))
    z = nn.gelu(of(nn.Dense(4 * width), "Dense_1", z))
    state = state.advance(
      of(nn.Dense(width), "Dense_0", z), steps[1], row.appends
    )
    state = state.commit(steps, row.appends)
  if schedule.final is None:
    return state.stream_BxTxD
  return read(2 * num_layers, schedule.final)


EMBEDDED = jax.random.normal(jax.random.key(0), (2, 5, 8))
MASK = nn.make_causal_mask(EMBEDDED[..., 0])


@pytest.mark.parametrize(
  "variant",
  ["attnres_block", "delta_block_released", "delta_replace"],
)
def test_a_block_of_somebody_else_is_routed(variant):
  names, layers = theirs(), 2
  routing = RoutingConfig(variant=variant, num_blocks=2)
  model = names["Routed"](
    [names["TheirBlock"]() for _ in range(layers)], routing
  )
  variables = with_random_routers(
    quick_jit(model.init)(jax.random.key(1), EMBEDDED, MASK)
  )
  found = quick_jit(model.apply)(variables, EMBEDDED, MASK)

  def expected_of(routing):
    return quick_jit(lambda x: by_hand(x, routing, EMBEDDED, MASK, layers))(
      variables["params"]
    )

  expected = expected_of(routing)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  plain = expected_of(RoutingConfig(variant="standard"))
  assert np.abs(found - plain).max() > 0.01


def test_with_a_gate_it_is_their_model_at_first():
  names = theirs()
  blocks = [names["TheirBlock"]() for _ in range(2)]
  routing = RoutingConfig(variant="delta_block", num_blocks=2, gate="scalar")
  model = names["Routed"](blocks, routing)
  variables = nn.meta.unbox(
    quick_jit(model.init)(jax.random.key(1), EMBEDDED, MASK)
  )
  x = EMBEDDED
  for i, block in enumerate(blocks):
    own = {"params": variables["params"][f"blocks_{i}"]}
    x = quick_jit(block.apply)(own, x, MASK)
  found = quick_jit(model.apply)(variables, EMBEDDED, MASK)
  np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "variant, options",
  [
    ("rd_delta", {"null_source": True, "gate": "sigmoid"}),
    ("embedding_skip_scaled", {}),
  ],
)
def test_every_variant_learns_in_nnx(variant, options):
  names = {"__name__": "page"}
  exec(NNX[: NNX.index("rngs =")], names)
  exec(EVERY[: EVERY.index("split =")], names)
  routing = RoutingConfig(variant=variant, **options)
  schedule = build_schedule(routing, 2)
  state = DepthState.create(jnp.ones((1, 2, names["WIDTH"])), schedule)
  read = names["Read"](routing, routing.row.roles)
  step = schedule.step(2)

  @nnx.jit
  def gradient_of(read):
    inputs = read(state, step)
    assert len(inputs) == len(routing.row.roles.inputs)
    return nnx.grad(lambda read: read(state, step).sum())(read)

  gradient = gradient_of(read)
  leaves = jax.tree_util.tree_leaves_with_path(gradient)
  named = {str(path): float(np.abs(x).max()) for path, x in leaves}
  assert any("gate" in path and x > 0 for path, x in named.items()), named
