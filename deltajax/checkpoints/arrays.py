"""Arrays made of the tensors of a checkpoint, without a copy of the whole.

Shapes: N layers.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # Bytes; JAX uses such memory of a CPU as it is.
# Edges of the blocks of a transposed copy: both sides fit the cache.
BLOCK_ROWS, BLOCK_COLUMNS = 64, 512

Bounds = tuple[tuple[int, int], ...]


def contiguous(x: np.ndarray, dtype: str) -> np.ndarray:
  """A contiguous array of a dtype, x itself where it is one."""
  if x.dtype == jnp.dtype(dtype) and x.flags.c_contiguous:
    return x
  out = np.empty(x.shape, jnp.dtype(dtype))
  copy(out, x)
  return out


def copy(out: np.ndarray, x: np.ndarray, row_axes: int = 1) -> None:
  """Like `out[...] = x`, and fast where x is transposed.

  Args:
    out: contiguous.
    x: of the same shape; any dtype and strides.
    row_axes: leading axes that are the rows of a matrix.
  """
  if x.ndim < 2 or x.flags.c_contiguous:
    out[...] = x
    return
  shape = (math.prod(x.shape[:row_axes]), math.prod(x.shape[row_axes:]))
  rows, columns = shape
  out, x = out.reshape(shape), x.reshape(shape)
  for i in range(0, rows, BLOCK_ROWS):
    for j in range(0, columns, BLOCK_COLUMNS):
      block = slice(i, i + BLOCK_ROWS), slice(j, j + BLOCK_COLUMNS)
      out[block] = x[block]


def assemble(
  tensors: Sequence[Callable[[], np.ndarray]],
  shape: tuple[int, ...],
  dtype: str,
  *,
  stacked: bool,
  row_axes: int = 1,
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """A parameter made of the tensors of its layers, one in memory at a time.

  Args:
    tensors: functions; each gives the tensor of one layer, or the only one.
    shape: of the parameter.
    dtype: of the parameter.
    stacked: whether its first axis are layers.
    row_axes: leading axes of a tensor that are the rows of a matrix.
    sharding: of the parameter: this host holds its own parts alone. None:
      whole, on JAX's default device.
  """
  indices: dict[Any, tuple[slice, ...]] = {None: (slice(None),) * len(shape)}
  if sharding is not None:
    indices = dict(sharding.addressable_devices_indices_map(shape))
  # A parameter that is not stacked is one layer.
  if not stacked:
    shape, indices = (
      (1, *shape),
      {d: (slice(None), *indices[d]) for d in indices},
    )
  bounds = {device: _bounds(x, shape) for device, x in indices.items()}
  buffers = {
    part: _aligned_empty([stop - start for start, stop in part], dtype)
    for part in bounds.values()
  }
  for layer, tensor in enumerate(tensors):
    holders = [part for part in buffers if part[0][0] <= layer < part[0][1]]
    if not holders:
      continue
    x = tensor()
    for part in holders:
      (first, _), *inner = part
      index = tuple(slice(start, stop) for start, stop in inner)
      copy(buffers[part][layer - first, ...], x[index], row_axes)
  shards = {
    device: buffers[part] if stacked else buffers[part][0, ...]
    for device, part in bounds.items()
  }
  if sharding is None:
    return jax.device_put(shards[None])
  return jax.make_array_from_single_device_arrays(
    shape if stacked else shape[1:],
    sharding,
    [jax.device_put(x, device) for device, x in shards.items()],
  )


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  return tuple(
    part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
  )


def _aligned_empty(shape: Sequence[int], dtype: str) -> np.ndarray:
  size = math.prod(shape) * jnp.dtype(dtype).itemsize
  raw = np.empty(size + ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % ALIGNMENT
  return raw[start : start + size].view(jnp.dtype(dtype)).reshape(shape)
