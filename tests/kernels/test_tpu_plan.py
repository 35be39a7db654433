"""Tiles, and what the blocks of the TPU kernels move."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from deltajax.kernels import tpu_plan

KIND = "TPU v5"
BACKWARD = pytest.mark.parametrize("backward", [False, True])


@BACKWARD
@pytest.mark.parametrize("reads", [1, 2, 16])
def test_tiles_and_chunks_are_whole_registers(reads, backward):
  for length, width in itertools.product(
    (1, 7, 100, 128, 200, 300, 384, 2048), (576, 1024, 4096, 7168)
  ):
    tile = tpu_plan.choose_tile(
      length, width, reads, 1, "bfloat16", backward, KIND
    )
    assert tile.tokens == length or tile.tokens % 16 == 0
    assert tile.tokens <= length
    assert tile.rows == tile.tokens or tile.rows % 16 == 0
    # Float32 copies of rows stay small, but for a chunk of 16 at least.
    assert tile.rows <= 16 or tile.rows * width <= tpu_plan.CHUNK_ELEMENTS
    assert tile.tokens % tile.rows == 0


def vectors_moved(S, D, R, dtype, backward) -> float:
  """Per token and read, scalars included, in vectors of D."""
  plan = tpu_plan.Plan.make(
    jax.ShapeDtypeStruct((R, D), jnp.float32),
    jax.ShapeDtypeStruct((S, 1, 4096, D), dtype),
    1,
    1e-6,
    backward=backward,
    device_kind=KIND,
  )
  vectors, scalars = plan.traffic
  assert scalars <= (16 if backward else R)
  return (vectors + 4 * scalars / D / jnp.dtype(dtype).itemsize) / R


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [1024, 4096, 7168])
@pytest.mark.parametrize("S", [2, 9, 33, 73])
def test_what_a_read_moves(S, D, dtype):
  """Every source and a mix; backward gradients of both as well."""
  assert S + 1 <= vectors_moved(S, D, 1, dtype, False) <= S + 1.1
  assert 3 * S + 2 <= vectors_moved(S, D, 1, dtype, True) <= 3 * S + 2.2
  # Two reads share the sources.
  assert vectors_moved(S, D, 2, dtype, False) <= S / 2 + 1.1
  assert vectors_moved(S, D, 2, dtype, True) <= 3 * S / 2 + 2.2


def test_a_block_that_stays_is_moved_once():
  plan = tpu_plan.Plan.make(
    jax.ShapeDtypeStruct((1, 128), jnp.float32),
    jax.ShapeDtypeStruct((5, 3, 1024, 128), jnp.float32),
    1,
    1e-6,
    backward=True,
    device_kind=KIND,
  )
  tokens = 3 * 1024
  assert plan.num_tiles == 2
  # 8 rows of queries once, and their gradients of every tile.
  assert plan.traffic.vectors == 3 * 5 + 2 + (8 + 8 * 3 * 2) / tokens
  assert plan.traffic.scalars == 2 * 8
