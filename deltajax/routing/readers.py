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

from deltajax.routing.sharding import active_sharding
from deltajax.routing.streaming import PartialRead


class Reader(NamedTuple):
  """How to read the visible slots of a memory.

  Attributes:
    forward: (queries_RxK, slots_SxBxTxD, visible_R, heads, eps) -> PartialRead
      with the mix in the dtype of the slots.
    backward: (queries_RxK, slots_SxBxTxD, visible_R, read, d_read,
      d_slots_SxBxTxD, heads, eps) -> (d_queries_RxK, float32, of these tokens,
      and d_slots_SxBxTxD plus what the read adds).
  """

  forward: Callable[..., PartialRead]
  backward: Callable[..., tuple[jax.Array, jax.Array]]


# Logical axes.
QUERIES = (None, None)
SLOTS = (None, "batch", "sequence", None)
READ: Any = PartialRead._make(
  [(None, "batch", "sequence", None), (None, None, "batch", "sequence")]
)


def read_slots(
  reader: Reader,
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  heads: int,
  eps: float,
) -> tuple[PartialRead, jax.Array]:
  """Reads the visible slots of the memory.

  Args:
    reader: the implementation.
    queries_RxK: query times key norm weight, for each read.
    slots_SxBxTxD: the memory.
    visible_R: int32, how many slots each read sees.
    heads: H.
    eps: of the key norm.

  Returns:
    The read, and the memory itself. Whoever reads next should take that: the
    gradient of the memory then runs from read to read and each adds to it in
    place, where gradients of one array that is used twice would each be as
    large as the memory, and added.
  """
  sharding = active_sharding()

  def forward(queries_RxK, slots_SxBxTxD, visible_R):
    return reader.forward(queries_RxK, slots_SxBxTxD, visible_R, heads, eps)

  def backward(*args):
    d_queries_RxK, d_slots_SxBxTxD = reader.backward(*args, heads, eps)
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
