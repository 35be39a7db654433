"""One pass of several reads over the memory, by any implementation.

An implementation is a pair of functions of what lies on one device. Here they
become one differentiable function that runs on every device of a mesh: reads
are local to a token, so that the only thing devices exchange is the gradient
of the queries, summed once.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from deltajax.routing.choice import compute_capability
from deltajax.routing.partial_read import MASKED, PartialRead, ReadCase
from deltajax.routing.sharding import active_sharding, traced_device


class Reader(NamedTuple):
  """How to read the visible slots of a memory.

  Attributes:
    forward: (queries_RxK, slots_SxBxTxD, visible_R, case) -> PartialRead with
      the mix in the dtype of the slots.
    backward: (queries_RxK, slots_SxBxTxD, visible_R, read, d_read,
      d_slots_SxBxTxD, case) -> (d_queries_RxK of these tokens, float32 or
      wider, and d_slots_SxBxTxD plus what the read adds).
    refusal: case -> why it is not supported, or None.
    platform: the only one that it runs on; None: any.
  """

  forward: Callable[..., PartialRead]
  backward: Callable[..., tuple[jax.Array, jax.Array]]
  refusal: Callable[[ReadCase], str | None] = lambda case: None
  platform: str | None = None


# Logical axes.
QUERIES = (None, None)
SLOTS = (None, "batch", "sequence", None)
READ: Any = PartialRead._make(
  [(None, "batch", "sequence", None), (None, None, "batch", "sequence")]
)


def case_of(
  queries_RxK: Any, slots_SxBxTxD: Any, heads: int, eps: float
) -> ReadCase:
  """The case of a call, on the devices that it is traced for.

  Args:
    queries_RxK: arrays, or their ShapeDtypeStructs.
    slots_SxBxTxD: the memory.
    heads: H.
    eps: of the key norm.
  """
  sharding = active_sharding()
  length, width = slots_SxBxTxD.shape[2:]
  device = traced_device()
  if sharding is not None:
    length //= sharding.num_shards("sequence")
  return ReadCase(
    reads=len(queries_RxK),
    heads=heads,
    width=width,
    length=length,
    dtype=str(slots_SxBxTxD.dtype),
    eps=eps,
    device_kind=device.device_kind,
    compute_capability=compute_capability(device),
  )


def read_slots(
  reader: Reader,
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  case: ReadCase,
) -> tuple[PartialRead, jax.Array]:
  """Reads the visible slots of the memory.

  Args:
    reader: the implementation.
    queries_RxK: query times key norm weight, for each read.
    slots_SxBxTxD: the memory.
    visible_R: int32, how many slots each read sees.
    case: of this call.

  Returns:
    The read, and the memory itself. Whoever reads next should take that: the
    gradient of the memory then runs from read to read and each adds to it in
    place, where gradients of one array that is used twice would each be as
    large as the memory, and added.
  """
  if not len(slots_SxBxTxD):
    batch, length = slots_SxBxTxD.shape[1:3]
    nothing = PartialRead(
      jnp.zeros((case.reads, *slots_SxBxTxD.shape[1:]), slots_SxBxTxD.dtype),
      jnp.full((case.reads, case.heads, batch, length), MASKED),
    )
    return nothing, slots_SxBxTxD
  sharding = active_sharding()

  def forward(queries_RxK, slots_SxBxTxD, visible_R):
    return reader.forward(queries_RxK, slots_SxBxTxD, visible_R, case)

  def backward(*args):
    d_queries_RxK, d_slots_SxBxTxD = reader.backward(*args, case)
    if sharding is not None:
      axes = sharding.mesh_axes("batch", "sequence")
      d_queries_RxK = lax.psum(d_queries_RxK, axes)
    return d_queries_RxK, d_slots_SxBxTxD

  if sharding is not None:
    forward_axes = (QUERIES, SLOTS, (None,))
    backward_axes = (*forward_axes, READ, READ, SLOTS)
    forward = sharding.shard_map(forward, forward_axes, READ)
    backward = sharding.shard_map(backward, backward_axes, (QUERIES, SLOTS))

  @jax.custom_vjp
  def read(queries_RxK, slots_SxBxTxD, visible_R):
    return forward(queries_RxK, slots_SxBxTxD, visible_R), slots_SxBxTxD

  def read_forward(*args):
    found, slots_SxBxTxD = read(*args)
    return (found, slots_SxBxTxD), (*args, found)

  def read_backward(residuals, cotangents):
    d_queries_RxK, d_slots_SxBxTxD = backward(*residuals, *cotangents)
    return d_queries_RxK.astype(residuals[0].dtype), d_slots_SxBxTxD, None

  read.defvjp(read_forward, read_backward)
  return read(queries_RxK, slots_SxBxTxD, visible_R)
