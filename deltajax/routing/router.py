"""The linen module that gives a sublayer what it reads.

Shapes: B batch, T sequence, D width, K key size, R reads, H heads, U roles, N
all sources of a read (null, slots, running).
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from deltajax.routing.depth_attention import (
  add_stream,
  choose_reader,
  depth_attention_weights,
  null_source,
  READERS,
)
from deltajax.routing.memory import DepthMemory, DepthState, Sources
from deltajax.routing.partial_read import PartialRead, Single
from deltajax.routing.readers import case_of, read_slots
from deltajax.routing.schedule import Step
from deltajax.routing.sharding import constrain
from deltajax.routing.streaming import merge, wide_dtype
from deltajax.routing.validation import ConfigError
from deltajax.routing.variants import Matrix, Roles, RoutingConfig

# Collection into which routing weights are captured where it is mutable.
CAPTURE = "routing"


class StoredRead(NamedTuple):
  """What one router has read of the stored slots, and what it asked.

  Attributes:
    queries_RxK: of its reads; the other sources are asked the same.
    read: None where there is no memory.
  """

  queries_RxK: jax.Array
  read: PartialRead | None


class DepthRouter(nn.Module):
  """Turns the depth state into the input of one sublayer, for each role.

  Parameters (only those that the config needs): `query` [queries, K],
  `key_norm` [K], `gate` [], `null_source` [D].

  With `mutable="routing"` the routing weights alpha_RxHxNxBxT of every read
  are captured beside the result, which does not change.

  Attributes:
    routing: the variant and its options.
    roles: how queries become inputs: `routing.row.roles` for an attention
      sublayer, `routing.row.single_role` for an MLP or the final read.
    width: D, of the stream.
    eps: of the key norm.
    implementation: of the pass over the memory, a name of `READERS`; None for
      the best on the platform.
    param_dtype: dtype of the parameters.

  Raises:
    ConfigError: when it is called, if `DepthState.commit` did not come where
      the schedule expects it, or the implementation does not serve the case.

  References:
    AttnRes, arXiv 2603.15031. Role-Decoupled AttnRes, arXiv 2608.01075.

  Examples:
    >>> from deltajax.routing import build_schedule, RoutingConfig
    >>> routing = RoutingConfig(variant="delta")
    >>> schedule = build_schedule(routing, num_layers=1)
    >>> state = DepthState.create(jnp.ones((1, 1, 4)), schedule)
    >>> router = DepthRouter(routing, routing.row.roles, width=4, eps=1e-6)
    >>> params = {"query": jnp.zeros((1, 4)), "key_norm": jnp.ones(4)}
    >>> inputs_UxBxTxD = router.apply(
    ...   {"params": params}, state, schedule.step(0)
    ... )
    >>> inputs_UxBxTxD.shape
    (1, 1, 1, 4)
  """

  routing: RoutingConfig
  roles: Roles
  width: int
  eps: float
  implementation: str | None = None
  param_dtype: str = "float32"

  def setup(self) -> None:
    """Declares the parameters."""
    routing = self.routing
    if self.roles.num_queries:
      size = routing.key_size(self.width)
      std = routing.query_init_std
      self.query = self._param(
        "query",
        nn.initializers.normal(std) if std else nn.initializers.zeros,
        ("queries", "embed"),
        (self.roles.num_queries, size),
      )
      self.key_norm = self._param(
        "key_norm", nn.initializers.ones, ("embed",), (size,)
      )
    if routing.null_source:
      self.null_source = self._param(
        "null_source", nn.initializers.zeros, ("embed",), (self.width,)
      )
    gate = routing.gate_function
    if gate is not None:
      initial = nn.initializers.constant(gate.initial)
      self.gate = self._param("gate", initial, (), ())

  def queries(self) -> jax.Array:
    """Returns queries_RxK, times the key norm: all that a read learns."""
    if not self.roles.num_queries:
      size = self.routing.key_size(self.width)
      return jnp.zeros((self.roles.num_reads, size), self.param_dtype)
    queries_RxK = _combine(self.roles.queries, self.query * self.key_norm)
    # Whole on every device, and gathered once, not for every source.
    return constrain(queries_RxK, None, None)

  def __call__(
    self, state: DepthState, step: Step, stored: StoredRead | None = None
  ) -> jax.Array:
    """Returns inputs_UxBxTxD, one for each of the U roles.

    Args:
      state: the depth state before the sublayer.
      step: the sublayer's row of the schedule.
      stored: from `read_together`; None to read the stored slots here. A
        sublayer without any source gets the stream.
    """
    stream_BxTxD = state.stream_BxTxD
    if stored is None:
      (stored,), state = read_together([self], state, [step])
    queries_RxK, read = stored
    if self.is_mutable_collection(CAPTURE) and not self.is_initializing():
      weights = depth_attention_weights(
        queries_RxK,
        self._sources(state, step),
        self.routing.heads,
        self.eps,
      )
      self.sow(CAPTURE, "weights", weights, reduce_fn=lambda _, new: new)

    singles = self._singles(state, step)
    if read is None and not singles:
      mixed_RxBxTxD = jnp.zeros((1, 1, 1, 1), wide_dtype(stream_BxTxD))
    else:
      mixed_RxBxTxD = merge(
        queries_RxK, read, singles, self.routing.heads, self.eps
      )
    gate = self.routing.gate_function
    adds_stream = self.routing.row.additive and gate is None
    inputs_UxBxTxD = _combine(
      self.roles.inputs,
      add_stream(
        mixed_RxBxTxD, stream_BxTxD if adds_stream else None, stream_BxTxD.dtype
      ),
    )
    if gate is None:
      return inputs_UxBxTxD
    scale = gate.function(self.gate)
    added = scale * inputs_UxBxTxD.astype(scale.dtype)
    return stream_BxTxD + added.astype(stream_BxTxD.dtype)

  def _singles(self, state: DepthState, step: Step) -> tuple[Single, ...]:
    """The sources that are not in the memory."""
    self._check_recent(state, step)
    singles = [
      Single(source_BxTxD, step.stored + i < step.visible)
      for i, source_BxTxD in enumerate(state.recent)
    ]
    if self.routing.null_source:
      singles.append(null_source(self.null_source, state.stream_BxTxD.dtype))
    running_BxTxD = self._running(state)
    if running_BxTxD is not None:
      singles.append(Single(running_BxTxD, step.reads_running))
    return tuple(singles)

  def _check_recent(self, state: DepthState, step: Step) -> None:
    """Raises unless `commit` came where the schedule expects it."""
    if isinstance(step.visible, jax.core.Tracer):
      return
    expected = int(step.visible) - int(step.stored)
    if len(state.recent) != expected:
      raise ConfigError(
        f"{len(state.recent)} sources are recent where the schedule has"
        f" {expected}: call DepthState.commit once after each transformer"
        " layer, after its MLP has advanced the state."
      )

  def _sources(self, state: DepthState, step: Step) -> Sources:
    """All sources in the order of their weights, recent ones stored."""
    memory = state.memory
    for i, source_BxTxD in enumerate(state.recent):
      slot = step.stored + i
      memory = memory.append(source_BxTxD, slot, slot < step.visible)
    return Sources(
      null_D=self.null_source if self.routing.null_source else None,
      memory_SxBxTxD=memory.slots_SxBxTxD,
      visible=step.visible,
      running_BxTxD=self._running(state),
      running_visible=step.reads_running,
    )

  def _running(self, state: DepthState) -> jax.Array | None:
    return {
      "none": None,
      "delta": state.running_BxTxD,
      "stream": state.stream_BxTxD,
    }[self.routing.row.running_source]

  def _param(self, name, init, axes, shape) -> jax.Array:
    init = nn.with_logical_partitioning(init, axes)
    return self.param(name, init, shape, jnp.dtype(self.param_dtype))


def read_together(
  routers: Sequence[DepthRouter], state: DepthState, steps: Sequence[Step]
) -> tuple[list[StoredRead], DepthState]:
  """Reads the stored slots for several sublayers in one pass.

  Queries do not depend on activations, so that sublayers which see the same
  slots can read them at the same time.

  Args:
    routers: of the sublayers; they share all but roles and parameters.
    state: the depth state before the first of them.
    steps: their rows of the schedule.

  Returns:
    A read for each router, to be given to it as `stored`, and the state to go
    on with.

  Examples:
    >>> from deltajax.routing import build_schedule, RoutingConfig
    >>> routing = RoutingConfig(variant="delta_block", num_blocks=1)
    >>> schedule = build_schedule(routing, num_layers=1)
    >>> state = DepthState.create(jnp.ones((1, 1, 4)), schedule)
    >>> router = DepthRouter(routing, routing.row.roles, 4, 1e-6)
    >>> params = {"query": jnp.zeros((1, 4)), "key_norm": jnp.ones(4)}
    >>> bound = router.bind({"params": params})
    >>> steps = [schedule.step(0), schedule.step(1)]
    >>> reads, state = read_together([bound, bound], state, steps)
    >>> len(reads)
    2
  """
  router = routers[0]
  # Parameters depend on no implementation: initialisation runs on any host.
  name = "xla" if router.is_initializing() else router.implementation
  reads, memory = read_stored(
    [router.queries() for router in routers],
    state.memory,
    steps,
    heads=router.routing.heads,
    eps=router.eps,
    implementation=name,
  )
  return reads, dataclasses.replace(state, memory=memory)


def read_stored(
  queries: Sequence[jax.Array],
  memory: DepthMemory,
  steps: Sequence[Step],
  *,
  heads: int,
  eps: float,
  implementation: str | None,
) -> tuple[list[StoredRead], DepthMemory]:
  """As `read_together`, from queries_RxK of each router and the memory."""
  slots_SxBxTxD = memory.slots_SxBxTxD
  if not len(slots_SxBxTxD):
    return [StoredRead(q, None) for q in queries], memory
  visible_R = jnp.concatenate(
    [
      jnp.broadcast_to(jnp.asarray(step.stored, jnp.int32), len(q))
      for q, step in zip(queries, steps, strict=True)
    ]
  )
  queries_RxK = jnp.concatenate(queries)
  case = case_of(queries_RxK, slots_SxBxTxD, heads, eps)
  name = choose_reader(case, implementation).name
  read, slots_SxBxTxD = read_slots(
    READERS[name], queries_RxK, slots_SxBxTxD, visible_R, case
  )
  reads, start = [], 0
  for q in queries:
    own = slice(start, start + len(q))
    start = own.stop
    reads.append(StoredRead(q, PartialRead(*(x[own] for x in read))))
  return reads, DepthMemory(slots_SxBxTxD)


def _combine(matrix: Matrix, stacked: jax.Array) -> jax.Array:
  """Rows of `matrix @ stacked`; ones and zeros cost nothing and are exact."""
  rows = []
  for coefficients in matrix:
    terms = [
      x if c == 1 else c * x
      for c, x in zip(coefficients, stacked, strict=True)
      if c != 0
    ]
    rows.append(sum(terms[1:], start=terms[0]) if terms else None)
  zero = jnp.zeros_like(stacked[0])
  return jnp.stack([zero if row is None else row for row in rows])
