"""What routing carries from sublayer to sublayer.

Shapes: B batch, T sequence, D width, S slots of the memory.
"""

from collections.abc import Callable, Mapping
import types
from typing import Any, NamedTuple

import flax.struct
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from deltajax.routing.schedule import Schedule, Step
from deltajax.routing.sharding import constrain

# Name of the memory for `jax.checkpoint` policies.
MEMORY_NAME = "depth_memory"


@flax.struct.dataclass
class DepthMemory:
  """A stacked, append-only array of sources.

  Slots are written in order and never change once a block has closed, so that
  the memory at any depth is a prefix of the memory at the end.

  Attributes:
    slots_SxBxTxD: the sources; slots not yet appended are zero.
  """

  slots_SxBxTxD: jax.Array

  @classmethod
  def create(cls, embedding_BxTxD: jax.Array, schedule: Schedule):
    """A memory with room for a whole model and what it starts with."""
    shape = (schedule.num_slots, *embedding_BxTxD.shape)
    slots = jnp.zeros(shape, embedding_BxTxD.dtype)
    if schedule.slot_names[:1] == ("e",):
      slots = slots.at[0].set(embedding_BxTxD)
    return cls(constrain(slots, "slots", "batch", "sequence", "features"))

  def newest(self, slot: jax.Array) -> jax.Array:
    """The source just before `slot`."""
    return lax.dynamic_index_in_dim(
      self.slots_SxBxTxD, slot - 1, 0, keepdims=False
    )

  def append(
    self, source_BxTxD: jax.Array, slot: jax.Array, when: jax.Array
  ) -> "DepthMemory":
    """Writes a source to `slot` if `when`; both may be traced."""
    old = lax.dynamic_index_in_dim(self.slots_SxBxTxD, slot, 0, keepdims=False)
    new = jnp.where(when, source_BxTxD, old)
    slots = lax.dynamic_update_index_in_dim(self.slots_SxBxTxD, new, slot, 0)
    return DepthMemory(checkpoint_name(slots, MEMORY_NAME))


class Sources(NamedTuple):
  """Everything that one read may attend to, in the order of its weights.

  Attributes:
    null_D: a source that is the same for every token, or None.
    memory_SxBxTxD: stacked sources.
    visible: int32, how many slots are read; may be traced.
    running_BxTxD: one more source, or None.
    running_visible: bool, whether it is read; may be traced.
  """

  null_D: jax.Array | None
  memory_SxBxTxD: jax.Array
  visible: Any
  running_BxTxD: jax.Array | None
  running_visible: Any


@flax.struct.dataclass
class DepthState:
  """The stream, the memory, and what the current block has added so far.

  Attributes:
    memory: the sources that are closed.
    stream_BxTxD: p, the sum of the embedding and all sublayer outputs.
    running_BxTxD: what the current block has added to the stream so far; zero
      at the start of a block.
  """

  memory: DepthMemory
  stream_BxTxD: jax.Array
  running_BxTxD: jax.Array

  @classmethod
  def create(
    cls, embedding_BxTxD: jax.Array, schedule: Schedule
  ) -> "DepthState":
    """The state before the first sublayer."""
    return cls(
      memory=DepthMemory.create(embedding_BxTxD, schedule),
      stream_BxTxD=embedding_BxTxD,
      running_BxTxD=jnp.zeros_like(embedding_BxTxD),
    )

  def advance(
    self, output_BxTxD: jax.Array, step: Step, appends: str
  ) -> "DepthState":
    """The state after a sublayer.

    Args:
      output_BxTxD: v_s, what the sublayer put out.
      step: the sublayer's row of the schedule.
      appends: `Variant.appends`, what becomes a source when a block closes.
    """
    output_BxTxD = output_BxTxD.astype(self.stream_BxTxD.dtype)
    output_BxTxD = constrain(output_BxTxD, "batch", "sequence", "features")
    moved = DepthState(
      memory=self.memory,
      stream_BxTxD=self.stream_BxTxD + output_BxTxD,
      running_BxTxD=self.running_BxTxD + output_BxTxD,
    )
    closed_source = CLOSED_SOURCES[appends]
    if closed_source is None:
      return moved
    memory = self.memory.append(
      closed_source(moved, step), step.slot, step.closes
    )
    return DepthState(
      memory=memory,
      stream_BxTxD=moved.stream_BxTxD,
      running_BxTxD=jnp.where(step.closes, 0, moved.running_BxTxD),
    )


# What a closing block leaves in the memory, by `Variant.appends`.
CLOSED_SOURCES: Mapping[str, Callable[[DepthState, Step], jax.Array] | None] = (
  types.MappingProxyType(
    {
      "nothing": None,
      "delta": lambda state, step: state.running_BxTxD,
      "state": lambda state, step: state.stream_BxTxD,
      "difference": lambda state, step: (
        state.stream_BxTxD - state.memory.newest(step.slot)
      ),
    }
  )
)
