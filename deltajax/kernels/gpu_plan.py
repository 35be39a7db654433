"""How the GPU kernels cut their work: tokens of a tile, warps, registers.

A program keeps what it works on in registers, in float32 whatever the dtype of
the memory is. Every multiprocessor from Ampere (8.0) to Blackwell has 65,536
registers of 32 bits, so that nothing here depends on the chip.

Shapes: N tokens, D width, C channels (D padded to a power of two), R reads, H
heads.
"""

from typing import NamedTuple

from jax.experimental import pallas as pl

# Of a multiprocessor.
REGISTERS = 64 * 1024
# What vectors may take of them: of several tokens, of one, and of one for which
# all is loaded again that can be. The rest is for addresses and sums.
TILE_SHARE, TOKEN_SHARE, LARGEST_SHARE = 1 / 2, 3 / 4, 15 / 16
# Elements of a tile, at most.
TILE_ELEMENTS = 4096
# Vectors of a token that are there for a moment: what is summed over channels.
TEMPORARIES = 1
# Values that a thread should hold, and warps of 32 threads that a program may
# have: 16 warps leave each thread 128 registers.
VALUES_OF_A_THREAD = 64
MAX_WARPS = 16


class Tile(NamedTuple):
  """What a program works on at once.

  Attributes:
    tokens: a power of two.
    channels: C.
    warps: of 32 threads.
    keeps: whether queries, and backward mixes and their gradients, stay in
      registers; otherwise they are loaded again, from the cache, for each
      source.
  """

  tokens: int
  channels: int
  warps: int
  keeps: bool


def registers(
  tokens: int,
  channels: int,
  keeps: bool,
  reads: int,
  heads: int,
  backward: bool,
) -> int:
  """How many the vectors of a program take; see `Tile` and `choose_tile`.

  Vectors of a token: forward a source and R mixes; backward a source and its
  gradient, and a mix and its gradient, of each read where they are kept; and
  temporaries. Vectors of a program: backward R gradients of queries; and a
  query, that of each read and head where they are kept.
  """
  of_token, of_program = 1 + reads, reads * heads if keeps else 1
  if backward:
    of_token = 2 + 2 * (reads if keeps else 1)
    of_program += reads
  of_token += TEMPORARIES
  return channels * (of_token * tokens + of_program)


def choose_tile(
  num_tokens: int, width: int, reads: int, heads: int, backward: bool
) -> Tile:
  """The largest tile of tokens whose vectors fit into registers.

  Args:
    num_tokens: N.
    width: D.
    reads: R.
    heads: H.
    backward: which of the two kernels.

  Raises:
    ValueError: if not even one token fits.
  """
  channels = pl.next_power_of_2(width)
  largest = min(
    max(TILE_ELEMENTS // channels, 1), pl.next_power_of_2(num_tokens)
  )

  # Tokens, whether all is kept, and what this may take.
  candidates = [
    *(
      (largest >> i, True, TILE_SHARE) for i in range(largest.bit_length() - 1)
    ),
    (1, True, TOKEN_SHARE),
    (1, False, LARGEST_SHARE),
  ]
  for tokens, keeps, share in candidates:
    needed = registers(tokens, channels, keeps, reads, heads, backward)
    if needed <= share * REGISTERS:
      threads = pl.cdiv(needed, VALUES_OF_A_THREAD)
      warps = min(pl.next_power_of_2(pl.cdiv(threads, 32)), MAX_WARPS)
      return Tile(tokens, channels, warps, keeps)
  raise ValueError(
    f"{reads} reads of width {width} need {needed:,} registers for one token,"
    f" a program may use {int(LARGEST_SHARE * REGISTERS):,}"
  )
