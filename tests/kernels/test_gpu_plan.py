"""Tiles of the GPU kernels, and the registers that they take."""

import itertools

import pytest

from deltajax.kernels import gpu_plan

BACKWARD = pytest.mark.parametrize("backward", [False, True])


def registers_of(tile, reads, heads, backward):
  return gpu_plan.registers(
    tile.tokens, tile.channels, tile.keeps, reads, heads, backward
  )


@BACKWARD
def test_tiles_fit_and_are_powers_of_two(backward):
  for num_tokens, width, reads, heads in itertools.product(
    (1, 3, 8192), (8, 64, 123, 1280, 4096), (1, 2, 8), (1, 4)
  ):
    tile = gpu_plan.choose_tile(num_tokens, width, reads, heads, backward)
    assert tile.tokens.bit_count() == tile.channels.bit_count() == 1
    assert width <= tile.channels < 2 * width
    assert tile.tokens < 2 * num_tokens
    assert tile.tokens == 1 or (
      tile.tokens * tile.channels <= gpu_plan.TILE_ELEMENTS
    )
    registers = registers_of(tile, reads, heads, backward)
    assert registers <= gpu_plan.LARGEST_SHARE * gpu_plan.REGISTERS
    assert 1 <= tile.warps <= gpu_plan.MAX_WARPS
    # 16 warps have the registers of a multiprocessor between them.
    assert registers / (32 * tile.warps) <= 120


@pytest.mark.parametrize(
  ("width", "reads", "backward", "tokens", "keeps", "vectors"),
  [
    (1024, 1, False, 4, True, 4 * 3 + 1),
    (1024, 1, True, 4, True, 4 * 5 + 2),
    (1024, 3, True, 2, True, 2 * 9 + 6),
    (4096, 2, True, 1, True, 7 + 4),
    (4096, 6, True, 1, False, 5 + 1 + 6),
    (8192, 1, True, 1, False, 5 + 1 + 1),
    (8192, 2, False, 1, True, 4 + 2),
    (8192, 3, False, 1, False, 5 + 1),
  ],
)
def test_what_a_program_holds(width, reads, backward, tokens, keeps, vectors):
  tile = gpu_plan.choose_tile(8192, width, reads, 1, backward)
  assert (tile.tokens, tile.keeps) == (tokens, keeps)
  assert registers_of(tile, reads, 1, backward) == vectors * width


def test_what_fits_no_program_is_refused():
  with pytest.raises(ValueError, match=r"114,688 registers .* may use 61,440"):
    gpu_plan.choose_tile(8192, 16_384, 1, 1, backward=True)
