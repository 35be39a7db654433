"""How the TPU kernels cut their work: tiles, blocks, grid, and bytes.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size,
G = R H logits of a source, Q rows of queries (G, padded).
"""

from collections.abc import Callable
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
import jax.numpy as jnp

LANES, SUBLANES = 128, 8
MIB = 2**20
# VMEM of a core in MiB, by `device_kind`; newer ones have at least 64.
VMEM_MIB = {
  "TPU v2": 16,
  "TPU v3": 16,
  "TPU v4": 16,
  "TPU v5 lite": 128,
  "TPU v5": 64,
  "TPU v6 lite": 128,
  "TPU7x": 64,
}
# What blocks may take of it, and what the compiler may: its own temporaries
# are rows in float32, see `CHUNK_ELEMENTS`.
BLOCKS_SHARE, LIMIT_SHARE = 5 / 8, 7 / 8
# Rows that are worked on at once: their float32 copies stay small.
CHUNK_ELEMENTS = 64 * 1024
# Tokens of a tile; the last ones where wide vectors or many reads leave no
# room. All are whole tiles of registers, for bfloat16 too.
TILES = (512, 256, 128, 64, 32, 16)


class Tile(NamedTuple):
  """How much of the memory one step of the grid works on.

  Attributes:
    tokens: of a block.
    rows: tokens of a block that are worked on at once.
    vmem_bytes: of all blocks, twice those that are streamed, and scratch.
  """

  tokens: int
  rows: int
  vmem_bytes: int


def choose_tile(
  length: int,
  width: int,
  reads: int,
  heads: int,
  dtype: Any,
  backward: bool,
  device_kind: str,
) -> Tile:
  """The largest tile of tokens whose blocks fit into VMEM.

  Blocks of [tokens, D]: forward a source and R mixes, double-buffered, and R
  float32 accumulators; backward a source, its gradient before and after, R
  mixes and R gradients, double-buffered.

  Args:
    length: T.
    width: D.
    reads: R.
    heads: H.
    dtype: of the memory.
    backward: which of the two kernels.
    device_kind: of the TPU, such as `TPU v5 lite`.

  Raises:
    ValueError: if not even the smallest tile fits.
  """
  item = jnp.dtype(dtype).itemsize
  lanes = -(-width // LANES) * LANES
  rows_of_queries = query_rows(reads, heads)
  queries = 2 * (4 + 3 * 2) * rows_of_queries * lanes
  if backward:
    vectors = 2 * item * (3 + 2 * reads)
    queries += 2 * 4 * rows_of_queries * lanes  # their gradient
  else:
    vectors = 2 * item * (1 + reads) + 4 * reads
  # Statistics lie in columns: each takes a whole row of lanes.
  statistics = 4 * 4 * -(-rows_of_queries // LANES) * LANES
  budget = int(BLOCKS_SHARE * vmem_bytes(device_kind))
  # A sequence of few tokens is one tile, if it fits and can be worked on whole.
  tiles = [n for n in TILES if n <= length]
  if length < LANES and length * lanes <= CHUNK_ELEMENTS:
    tiles.insert(0, length)
  for tokens in tiles or [length]:
    size = tokens * (vectors * lanes + statistics) + queries
    if size <= budget:
      rows = tokens
      while rows % 32 == 0 and rows * lanes > CHUNK_ELEMENTS:
        rows //= 2
      return Tile(tokens, rows, size)
  raise ValueError(
    f"{reads} reads of width {width} in {jnp.dtype(dtype)} need"
    f" {size / MIB:.0f} MiB of VMEM for {tokens} tokens, {budget / MIB:.0f} MiB"
    f" may be used on {device_kind}"
  )


def vmem_bytes(device_kind: str) -> int:
  """The VMEM of a core."""
  return VMEM_MIB.get(device_kind, 64) * MIB


def query_rows(reads: int, heads: int) -> int:
  """Q: a row for each read and head, padded to whole registers."""
  return -(-reads * heads // SUBLANES) * SUBLANES


class Operand(NamedTuple):
  """An argument or result of a kernel, and the block that a step has of it.

  Attributes:
    shape: of the array.
    dtype: of the array.
    block: its shape.
    place: step of the grid (b, t, s, ...) -> where its block is, in blocks.
    of_scalars: whether it holds numbers of a token, not vectors.
  """

  shape: tuple[int, ...]
  dtype: Any
  block: tuple[int, ...]
  place: Callable[..., tuple[Any, ...]]
  of_scalars: bool = False

  @property
  def spec(self) -> pl.BlockSpec:
    """For Pallas."""
    return pl.BlockSpec(self.block, self.place)


class Traffic(NamedTuple):
  """What a kernel moves between HBM and VMEM, for each token.

  Attributes:
    vectors: of D elements in the dtype of the memory.
    scalars: in float32.
  """

  vectors: float
  scalars: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static about a kernel.

  Attributes:
    backward: which of the two it is.
    slots: S.
    batch: B.
    length: T.
    width: D.
    reads: R.
    heads: H.
    key_size: K.
    dtype: of the memory.
    eps: of the key norm.
    tile: of tokens.
    vmem_limit: bytes that the compiler may use.
  """

  backward: bool
  slots: int
  batch: int
  length: int
  width: int
  reads: int
  heads: int
  key_size: int
  dtype: Any
  eps: float
  tile: Tile
  vmem_limit: int

  @classmethod
  def make(
    cls,
    queries_RxK: Any,
    slots_SxBxTxD: Any,
    heads: int,
    eps: float,
    *,
    backward: bool,
    device_kind: str,
  ) -> "Plan":
    """The plan for arrays, or their ShapeDtypeStructs.

    Raises:
      ValueError: if no tile fits, see `choose_tile`.
    """
    slots, batch, length, width = slots_SxBxTxD.shape
    reads, key_size = queries_RxK.shape
    dtype = jnp.dtype(slots_SxBxTxD.dtype)
    return cls(
      backward=backward,
      slots=slots,
      batch=batch,
      length=length,
      width=width,
      reads=reads,
      heads=heads,
      key_size=key_size,
      dtype=dtype,
      eps=eps,
      tile=choose_tile(
        length, width, reads, heads, dtype, backward, device_kind
      ),
      vmem_limit=int(LIMIT_SHARE * vmem_bytes(device_kind)),
    )

  @property
  def logits(self) -> int:
    """G."""
    return self.reads * self.heads

  @property
  def rows(self) -> int:
    """Q."""
    return query_rows(self.reads, self.heads)

  @property
  def num_tiles(self) -> int:
    """Of a sequence."""
    return pl.cdiv(self.length, self.tile.tokens)

  @property
  def inputs(self) -> list[Operand]:
    """Queries, the memory; backward what was read, gradients, the old one."""
    forward = [*self._queries(), self._source()]
    if not self.backward:
      return forward
    mixes, scalars = self._mixes(), self._scalars(self.rows)
    return [*forward, mixes, mixes, scalars, scalars, self._source()]

  @property
  def outputs(self) -> list[Operand]:
    """Mixes and log-sum-exps, or gradients of the memory and the queries."""
    if self.backward:
      return [self._source(), self._d_queries()]
    return [self._mixes(), self._scalars(self.logits)]

  @property
  def traffic(self) -> Traffic:
    """With all slots read: a block moves whenever a step has another one."""
    steps = list(
      itertools.product(
        range(self.batch), range(self.num_tiles), range(self.slots)
      )
    )
    num_bytes = {True: 0, False: 0}
    for operand in (*self.inputs, *self.outputs):
      places = [operand.place(*step, None) for step in steps]
      moves = 1 + sum(map(tuple.__ne__, places, places[1:]))
      size = math.prod(operand.block) * operand.dtype.itemsize
      num_bytes[operand.of_scalars] += moves * size
    tokens = self.batch * self.length
    return Traffic(
      vectors=num_bytes[False] / tokens / self.width / self.dtype.itemsize,
      scalars=num_bytes[True] / tokens / 4,
    )

  def _queries(self) -> list[Operand]:
    """[Q, D] in float32, for a bfloat16 memory [3 Q, D] in bfloat16 as well."""
    shapes = [((self.rows, self.width), jnp.dtype(jnp.float32))]
    if self.dtype == jnp.bfloat16:
      shapes.append(((3 * self.rows, self.width), self.dtype))
    return [
      Operand(shape, dtype, shape, lambda *_: (0, 0)) for shape, dtype in shapes
    ]

  def _source(self) -> Operand:
    """Of the memory, or of its gradient."""
    return Operand(
      (self.slots, self.batch, self.length, self.width),
      self.dtype,
      (1, 1, self.tile.tokens, self.width),
      lambda b, t, s, _: (s, b, t, 0),
    )

  def _mixes(self) -> Operand:
    """Mixes of all reads, or their gradients."""
    return Operand(
      (self.reads, self.batch, self.length, self.width),
      self.dtype,
      (self.reads, 1, self.tile.tokens, self.width),
      lambda b, t, s, _: (0, b, t, 0),
    )

  def _scalars(self, rows: int) -> Operand:
    """Numbers of each token, by tile, so that a tile may be of any size."""
    return Operand(
      (self.batch, self.num_tiles, rows, self.tile.tokens),
      jnp.dtype(jnp.float32),
      (1, 1, rows, self.tile.tokens),
      lambda b, t, s, _: (b, t, 0, 0),
      of_scalars=True,
    )

  def _d_queries(self) -> Operand:
    """Gradient of the queries, by tile."""
    return Operand(
      (self.batch, self.num_tiles, self.rows, self.width),
      jnp.dtype(jnp.float32),
      (1, 1, self.rows, self.width),
      lambda b, t, s, _: (b, t, 0, 0),
    )
