"""What routing carries from sublayer to sublayer.

Shapes: B batch, T sequence, D width, S slots of the memory.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import types
from typing import Any, NamedTuple

import flax.struct
import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from deltajax.routing.schedule import Schedule, Step
from deltajax.routing.sharding import active_sharding, constrain
from deltajax.routing.validation import check_name


@flax.struct.dataclass
class DepthMemory:
  """A stacked, append-only array of sources.

  Slots are written in order and never change once a block has closed, so that
  the memory at any depth is a prefix of the memory at the end.

  Attributes:
    slots_SxBxTxD: the sources; slots not yet appended are zero.

  Examples:
    >>> from deltajax.routing import build_schedule, RoutingConfig
    >>> schedule = build_schedule(RoutingConfig(variant="delta"), num_layers=2)
    >>> memory = DepthMemory.create(jnp.ones((1, 3, 8)), schedule)
    >>> memory.slots_SxBxTxD.shape  # The embedding, and room for 3 outputs.
    (4, 1, 3, 8)
  """

  slots_SxBxTxD: jax.Array

  @classmethod
  def create(cls, embedding_BxTxD: jax.Array, schedule: Schedule):
    """A memory with room for a whole model and what it starts with."""
    shape = (schedule.num_slots, *embedding_BxTxD.shape)
    slots = jnp.zeros(shape, embedding_BxTxD.dtype)
    memory = cls(constrain(slots, "slots", "batch", "sequence", "features"))
    if schedule.slot_names[:1] == ("e",):
      memory = memory.append(embedding_BxTxD, jnp.int32(0), jnp.bool_(True))
    return memory

  def slot(self, slot: jax.Array) -> jax.Array:
    """The source_BxTxD in a slot, which may be traced."""
    return _get(self.slots_SxBxTxD, slot)

  def append(
    self,
    source_BxTxD: jax.Array,
    slot: jax.Array,
    when: jax.Array,
    less_newest: bool = False,
  ) -> "DepthMemory":
    """Writes a source to a slot, which nothing has read before.

    What the slot held is not given a gradient of 0, as it should: nothing can
    have come of it, and to write that 0 costs more than all the rest.

    Args:
      source_BxTxD: the source.
      slot: where; may be traced.
      when: whether; may be traced.
      less_newest: write the source less the one before the slot.
    """
    return DepthMemory(
      _append(self.slots_SxBxTxD, source_BxTxD, slot, when, less_newest)
    )


def _append(slots_SxBxTxD, source_BxTxD, slot, when, less_newest):
  get_row_major = _get_row_major
  sharding = active_sharding()
  if sharding is not None:
    # The compiler would gather all tokens for a constraint of the layout.
    source_axes = ("batch", "sequence", None)
    get_row_major = sharding.shard_map(
      _get_row_major, ((None, *source_axes), ()), source_axes
    )

  @jax.custom_vjp
  def append(slots_SxBxTxD, source_BxTxD, slot, when):
    if less_newest:
      source_BxTxD = source_BxTxD - _get(slots_SxBxTxD, slot - 1)
    new = jnp.where(when, source_BxTxD, _get(slots_SxBxTxD, slot))
    return _set(slots_SxBxTxD, new, slot)

  def forward(slots_SxBxTxD, source_BxTxD, slot, when):
    return append(slots_SxBxTxD, source_BxTxD, slot, when), (slot, when)

  def backward(residuals, d_slots_SxBxTxD):
    # Reads one slot; JAX's own gradient would add and copy whole memories.
    slot, when = residuals
    d_source_BxTxD = jnp.where(when, get_row_major(d_slots_SxBxTxD, slot), 0)
    if less_newest:
      newest = _get(d_slots_SxBxTxD, slot - 1) - d_source_BxTxD
      d_slots_SxBxTxD = _set(d_slots_SxBxTxD, newest, slot - 1)
    return d_slots_SxBxTxD, d_source_BxTxD, None, None

  append.defvjp(forward, backward)
  return append(slots_SxBxTxD, source_BxTxD, slot, when)


def _get_row_major(slots_SxBxTxD, slot):
  """A slot in the layout of the memory.

  Unconstrained, the layout that suits whoever wants this slot may be given to
  the whole memory, by way of a copy.
  """
  return with_layout_constraint(_get(slots_SxBxTxD, slot), Layout((0, 1, 2)))


def _get(slots, slot):
  return lax.dynamic_index_in_dim(slots, slot, 0, keepdims=False)


def _set(slots, source, slot):
  return lax.dynamic_update_index_in_dim(slots, source, slot, 0)


class Sources(NamedTuple):
  """Everything that one read may attend to, in the order of its weights.

  Attributes:
    null_D: a source that is the same for every token, or None.
    memory_SxBxTxD: stacked sources.
    visible: int32, how many slots are read, or [R]; may be traced.
    running_BxTxD: one more source, or None.
    running_visible: bool, whether it is read; may be traced.

  Examples:
    >>> slots = jnp.zeros((3, 1, 5, 8))
    >>> sources = Sources(None, slots, 2, jnp.ones((1, 5, 8)), True)
    >>> sources.memory_SxBxTxD.shape, sources.visible
    ((3, 1, 5, 8), 2)
  """

  null_D: jax.Array | None
  memory_SxBxTxD: jax.Array
  visible: Any
  running_BxTxD: jax.Array | None
  running_visible: Any


@flax.struct.dataclass
class DepthState:
  """The stream, the memory, and what the current block has added so far.

  The memory is written by `commit`, once a layer, or once a group of layers
  that read together (`read_group`): until then a source that has closed is
  recent. All reads of these layers can therefore go over the same slots in one
  pass (`router.read_together`), and its gradient never needs a memory other
  than the final one.

  Attributes:
    memory: the sources that are closed and stored.
    stream_BxTxD: p, the sum of the embedding and all sublayer outputs.
    running_BxTxD: what the current block has added to the stream so far; zero
      at the start of a block.
    recent: what the sublayers since the last commit have closed, a source for
      each that may close a block. Whether it did is for the schedule to say.

  Examples:
    >>> from deltajax.routing import build_schedule, RoutingConfig
    >>> schedule = build_schedule(RoutingConfig(variant="delta"), num_layers=1)
    >>> step = schedule.step(0)
    >>> state = DepthState.create(jnp.ones((1, 1, 2)), schedule)
    >>> output_BxTxD = jnp.full((1, 1, 2), 3.0)
    >>> state = state.advance(output_BxTxD, step, "delta")
    >>> state = state.commit([step], "delta")
    >>> state.stream_BxTxD.tolist()
    [[[4.0, 4.0]]]
    >>> state.memory.slots_SxBxTxD[:, 0, 0].tolist()  # e, and v0.
    [[1.0, 1.0], [3.0, 3.0]]
  """

  memory: DepthMemory
  stream_BxTxD: jax.Array
  running_BxTxD: jax.Array
  recent: tuple[jax.Array, ...] = ()

  @classmethod
  def create(
    cls, embedding_BxTxD: jax.Array, schedule: Schedule
  ) -> "DepthState":
    """The state before the first sublayer.

    Args:
      embedding_BxTxD: p_0; its dtype is that of stream and memory.
      schedule: of the whole model, which says how many slots there are.
    """
    return cls(
      memory=DepthMemory.create(embedding_BxTxD, schedule),
      stream_BxTxD=embedding_BxTxD,
      running_BxTxD=jnp.zeros_like(embedding_BxTxD),
    )

  def advance(
    self, output_BxTxD: jax.Array, step: Step, appends: str
  ) -> "DepthState":
    """The state after a sublayer, the source that it may close not stored yet.

    Args:
      output_BxTxD: v_s, what the sublayer put out.
      step: the sublayer's row of the schedule.
      appends: `Variant.appends`, what becomes a source when a block closes;
        `nothing` for a sublayer that never closes one.

    Raises:
      ConfigError: if nothing is called so.
    """
    _check_appends(appends)
    output_BxTxD = output_BxTxD.astype(self.stream_BxTxD.dtype)
    output_BxTxD = constrain(output_BxTxD, "batch", "sequence", "features")
    moved = dataclasses.replace(
      self,
      stream_BxTxD=self.stream_BxTxD + output_BxTxD,
      running_BxTxD=self.running_BxTxD + output_BxTxD,
    )
    if appends == "nothing":
      return moved
    closed_BxTxD = APPENDS[appends].closed(moved)
    return dataclasses.replace(
      moved,
      running_BxTxD=jnp.where(step.closes, 0, moved.running_BxTxD),
      recent=(*self.recent, closed_BxTxD),
    )

  def commit(self, steps: Sequence[Step], appends: str) -> "DepthState":
    """Stores the recent sources.

    Args:
      steps: rows of the schedule of the sublayers since the last commit, of
        which the last have left these sources.
      appends: `Variant.appends`.

    Raises:
      ConfigError: if nothing is called so.
    """
    _check_appends(appends)
    memory = self.memory
    steps = steps[len(steps) - len(self.recent) :]
    for source_BxTxD, step in zip(self.recent, steps, strict=True):
      memory = memory.append(
        source_BxTxD, step.slot, step.closes, APPENDS[appends].less_newest
      )
    return dataclasses.replace(self, memory=memory, recent=())


@dataclasses.dataclass(frozen=True)
class Append:
  """What a closing block leaves in the memory.

  Attributes:
    closed: the source, from the state at the block's end.
    less_newest: the newest slot is subtracted from it.
  """

  closed: Callable[[DepthState], jax.Array]
  less_newest: bool = False


# By `Variant.appends`; `nothing` is not here.
APPENDS: Mapping[str, Append] = types.MappingProxyType(
  {
    "delta": Append(lambda state: state.running_BxTxD),
    "state": Append(lambda state: state.stream_BxTxD),
    "difference": Append(lambda state: state.stream_BxTxD, less_newest=True),
  }
)


def _check_appends(appends: str) -> None:
  check_name("appends", appends, ("nothing", *APPENDS))
