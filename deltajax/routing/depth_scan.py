"""A scan over depth whose gradient keeps one copy of the depth memory.

A plain scan that carries the memory saves the whole carry at every layer for
the backward pass, so that memory grows with the square of depth. But slots are
appended and never changed: every earlier state of the memory is a prefix of the
last one. Here the forward scan saves one vector per token before each layer and
whatever the remat policy lets it save of the inside of a layer. The backward
scan runs each layer's gradient at the final memory, of which the layer sees its
prefix, and carries one gradient of the memory.

The vector is the stream; what a block has added so far is then a difference of
streams. Where sublayers neither read nor store the stream (AttnRes), it is what
the block has added so far. What the policies save for each layer besides that
[B, T, D]:

  none  everything that the layer's gradient needs, except the memory and what
        is read of it.
  dots  results of matrix products with parameters that it needs (Q, K, V, the
        attention output, and two of the MLP's three); the rest is computed
        again.
  full  nothing; the whole layer is computed again.

The backward scan writes gradients of parameters in place, those of a sublayer
before it goes on to the sublayer before; see `gradients.write_first`.

Queries do not depend on activations, so that layers can read the memory in
groups: one pass reads, for all sublayers of a group, what was stored before it.
What a sublayer of the group has left since then is merged with that. Where each
sublayer leaves a source, this costs S / 2g + g sources a read instead of S.

Shapes: L layers, G groups of g layers, B batch, T sequence, D width, S slots.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from functools import partial
import types
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.gradients import write_first
from deltajax.routing.memory import DepthMemory, DepthState
from deltajax.routing.router import read_stored, StoredRead
from deltajax.routing.schedule import Schedule, Step
from deltajax.routing.sharding import (
  active_sharding,
  Sharding,
  use_sharding,
)
from deltajax.routing.variants import RoutingConfig

_policies = jax.checkpoint_policies
# What a layer may save of its inside, by `ModelConfig.remat`.
REMAT_POLICIES: Mapping[str, Callable[..., Any]] = types.MappingProxyType(
  {
    "none": _policies.everything_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "full": _policies.nothing_saveable,
  }
)


# What a layer gets for the memory, which its group has read for it.
_NO_MEMORY: Any = None


class LayerParams(NamedTuple):
  """Parameters of a layer, or of all layers, stacked on axis 0.

  Attributes:
    routers: of the router of each sublayer.
    others: what else each sublayer has.
  """

  routers: tuple[Any, ...]
  others: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScannedLayer:
  """A transformer layer as pure functions.

  Attributes:
    queries: `LayerParams.routers` -> queries_RxK of each router.
    sublayers: two functions (router's params, the others, state, row of the
      schedule, what the router has read of the memory, consts) -> state after
      the sublayer, in which its source is recent.
    routing: of the model.
    eps: of the key norms.
    implementation: of the passes over the memory; see `DepthRouter`.
  """

  queries: Callable[[Any], Sequence[jax.Array]]
  sublayers: Sequence[
    Callable[[Any, Any, DepthState, Step, StoredRead, Any], DepthState]
  ]
  routing: RoutingConfig
  eps: float
  implementation: str | None


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is static about a scan.

  Attributes:
    layer: the layer.
    group: g.
    first_groups: [G, g], the group of the first layer of the block that is open
      before each layer; the layer's own where a block starts.
    needs_stream: as in `Schedule`.
    policy: of `jax.checkpoint`.
    sharding: that the scan is traced for. The backward pass is traced later.
  """

  layer: ScannedLayer
  group: int
  first_groups: tuple[tuple[int, ...], ...]
  needs_stream: bool
  policy: Callable[..., Any]
  sharding: Sharding | None = dataclasses.field(compare=False)

  @property
  def saved(self) -> str:
    """The vector of the state that is saved; others follow from it."""
    return "stream_BxTxD" if self.needs_stream else "running_BxTxD"


def depth_scan(
  layer: ScannedLayer,
  params: LayerParams,
  state: DepthState,
  schedule: Schedule,
  consts: Any,
  *,
  remat: str,
  group: int = 1,
) -> DepthState:
  """Applies all layers; returns the state after the last.

  Args:
    layer: the layer.
    params: parameters of all layers, stacked on axis 0.
    state: the state before the first layer.
    schedule: of the model.
    consts: what every layer is given besides: arrays without a gradient.
    remat: a name of `REMAT_POLICIES`.
    group: layers that read in one pass; see `schedule.check_group`.
  """
  plan = _Plan(
    layer=layer,
    group=group,
    first_groups=_first_groups(schedule, group),
    needs_stream=schedule.needs_stream,
    policy=REMAT_POLICIES[remat],
    sharding=active_sharding(),
  )
  steps = jax.tree.map(jnp.asarray, schedule.by_layer(group))
  return _scan(plan, params, state, steps, lax.stop_gradient(consts))


def _first_groups(
  schedule: Schedule, group: int
) -> tuple[tuple[int, ...], ...]:
  """See `_Plan`; blocks are either layers, or groups have one layer."""
  closed_before = np.roll(schedule.by_layer().closes[:, 1], 1)
  layers = np.arange(len(closed_before))
  starts = np.maximum.accumulate(np.where(closed_before, layers, 0))
  return tuple(map(tuple, (starts // group).reshape(-1, group).tolist()))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(plan, params, state, steps, consts):
  def body(state, xs):
    number, steps_g = xs
    group = _Group.make(plan, params, number, steps_g)

    def run(i, state, read):
      layer = group.layer(i)
      return layer(params.others, group.params[i], state, read, consts)[0]

    return group.forward(state, run), None

  return lax.scan(body, state, (_numbers(steps), steps))[0]


def _forward(plan, *args):
  params, state, steps, consts = jax.tree.map(lambda arg: arg.value, args)
  # A stack without a gradient has none written.
  stacked = jax.tree.map(
    lambda arg: arg.value if arg.perturbed else None, args[0].others
  )

  def body(state, xs):
    number, steps_g = xs
    group = _Group.make(plan, params, number, steps_g)
    saved, gradients = [], []

    def run(i, state, read):
      layer = jax.checkpoint(
        group.layer(i), policy=plan.policy, prevent_cse=False
      )
      gradient: Any
      (new_state, _), gradient = jax.vjp(
        layer, stacked, group.params[i], state, read, consts
      )
      # The arguments are given back in the backward pass; what is left of the
      # gradient is what the policy saved.
      gradient.args_res = []
      gradients.append(gradient)
      saved.append(getattr(state, plan.saved))
      return new_state

    return group.forward(state, run), (saved, gradients)

  final, (saved_GxBxTxD, gradients) = lax.scan(
    body, state, (_numbers(steps), steps)
  )
  memory = final.memory
  residuals = (
    params,
    stacked,
    memory,
    saved_GxBxTxD,
    gradients,
    steps,
    consts,
  )
  return final, residuals


def _backward(plan, residuals, d_final):
  # saved_GxBxTxD: an array for each place in a group, and so with gradients.
  params, stacked, memory, saved_GxBxTxD, gradients, steps, consts = residuals
  d_final = jax.tree.map(_array, d_final)

  def state_before(saved_BxTxD, first_BxTxD, recent):
    running_BxTxD = saved_BxTxD
    if plan.needs_stream:
      running_BxTxD = saved_BxTxD - first_BxTxD
    return DepthState(_NO_MEMORY, saved_BxTxD, running_BxTxD, recent)

  def body(carry, xs):
    d_state, d_others = carry
    number, steps_g, saved_BxTxD, gradients, first_groups = xs
    group = _Group.make(plan, params, number, steps_g)
    # What the group left has its place in the final memory.
    recent = tuple(memory.slot(step.slot) for step in group.closing)
    states = [
      state_before(
        saved_BxTxD[i],
        saved_GxBxTxD[i][first_groups[i]],
        recent[: len(recent) * i // plan.group],
      )
      for i in range(plan.group)
    ]
    routers = [params_l.routers for params_l in group.params]
    queries, queries_gradient = jax.vjp(group.queries, routers)
    (reads, _), read_gradient = jax.vjp(group.read, queries, memory)
    after = dataclasses.replace(states[-1], memory=memory, recent=recent)
    _, commit_gradient = jax.vjp(group.commit, after)

    (d_state,) = commit_gradient(d_state)
    d_memory, d_state = (
      d_state.memory,
      dataclasses.replace(d_state, memory=_NO_MEMORY),
    )
    d_routers: list[Any] = []
    d_reads: list[Any] = []
    for i in reversed(range(plan.group)):
      gradients[i].args_res = [
        stacked,
        group.params[i],
        states[i],
        reads[i],
        consts,
      ]
      d_others, d_layer, d_state, d_read, _ = gradients[i]((d_state, d_others))
      d_routers.insert(0, d_layer.routers)
      d_reads.insert(0, d_read)
    d_queries, d_memory = read_gradient((d_reads, d_memory))
    (d_asked,) = queries_gradient(d_queries)
    d_routers = jax.tree.map(jnp.add, d_routers, d_asked)
    d_state = dataclasses.replace(d_state, memory=d_memory)
    return (d_state, d_others), jax.tree.map(
      lambda *layers: jnp.stack(layers), *d_routers
    )

  xs = (
    _numbers(steps),
    steps,
    saved_GxBxTxD,
    gradients,
    jnp.array(plan.first_groups),
  )
  with use_sharding(plan.sharding):
    d_others = jax.tree.map(jnp.zeros_like, stacked)
    (d_state, d_others), d_routers_Gxg = lax.scan(
      body, (d_final, d_others), xs, reverse=True
    )
  d_routers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), d_routers_Gxg)
  return LayerParams(d_routers, d_others), d_state, None, None


_scan.defvjp(_forward, _backward, symbolic_zeros=True)


def _array(x: Any) -> jax.Array:
  """The gradient, where it may be a symbolic zero."""
  if isinstance(x, jax.custom_derivatives.SymbolicZero):
    return jnp.zeros(x.shape, x.dtype)
  return x


def _numbers(steps: Step) -> jax.Array:
  """Numbers of the groups."""
  return jnp.arange(len(steps.visible))


class _Group(NamedTuple):
  """Layers that read together: their parameters and rows of the schedule."""

  plan: _Plan
  numbers: list[Any]  # of the layers
  params: list[LayerParams]  # of each layer
  steps: list[Step]  # of each sublayer

  @classmethod
  def make(cls, plan: _Plan, params: Any, number: Any, steps: Step) -> "_Group":
    """Group `number` of all layers."""
    numbers = [number * plan.group + i for i in range(plan.group)]

    def of_layer(i):
      return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), params
      )

    return cls(
      plan,
      numbers,
      [of_layer(i) for i in numbers],
      [Step(*(x[s] for x in steps)) for s in range(2 * plan.group)],
    )

  def layer(self, i: int) -> Callable[..., tuple[DepthState, Any]]:
    """Layer i of the group, for a gradient in place.

    Returns:
      (others of all layers, params of this layer, state, reads, consts) ->
      the state after it, and the first argument, to go on with.
    """

    def run(stacked, params, state, reads, consts):
      stacked = list(stacked)
      for s, sublayer in enumerate(self.plan.layer.sublayers):
        own, stacked[s], (router, read), x_BxTxD = write_first(
          params.others[s],
          stacked[s],
          self.numbers[i],
          (params.routers[s], reads[s]),
          getattr(state, self.plan.saved),
        )
        state = dataclasses.replace(state, **{self.plan.saved: x_BxTxD})
        step = self.steps[2 * i + s]
        state = sublayer(router, own, state, step, read, consts)
      return state, tuple(stacked)

    return run

  @property
  def closing(self) -> list[Step]:
    """The rows of the sublayers that may leave a source."""
    row = self.plan.layer.routing.row
    if row.attention_appends != "nothing":
      return self.steps
    return self.steps[1::2] if row.appends != "nothing" else []

  def queries(self, params: Sequence[Any]) -> list[jax.Array]:
    """Queries of all routers."""
    return [q for of_layer in params for q in self.plan.layer.queries(of_layer)]

  def read(
    self, queries: Sequence[jax.Array], memory: DepthMemory
  ) -> tuple[list[list[StoredRead]], DepthMemory]:
    """What the routers of each layer read, and the memory to go on with."""
    layer = self.plan.layer
    reads, memory = read_stored(
      queries,
      memory,
      self.steps,
      heads=layer.routing.heads,
      eps=layer.eps,
      implementation=layer.implementation,
    )
    return [reads[i : i + 2] for i in range(0, len(reads), 2)], memory

  def commit(self, state: DepthState) -> DepthState:
    """Stores what the layers left."""
    return state.commit(self.closing, self.plan.layer.routing.row.appends)

  def forward(
    self,
    state: DepthState,
    run: Callable[[int, DepthState, Sequence[StoredRead]], DepthState],
  ) -> DepthState:
    """Reads, runs the layers, none of which needs the memory, and stores."""
    queries = self.queries([params.routers for params in self.params])
    reads, memory = self.read(queries, state.memory)
    state = dataclasses.replace(state, memory=_NO_MEMORY)
    for i, read in enumerate(reads):
      state = run(i, state, read)
    return self.commit(dataclasses.replace(state, memory=memory))
