"""Depth attention on TPUs: one pass of R reads over the depth memory.

The grid goes over batch, tiles of tokens, and sources, sources innermost: each
is streamed through VMEM once, all reads and heads take what they need of it
there, and an online softmax makes one mix of each. How many sources there are
is a scalar that is known before the grid starts, so that slots nobody sees are
never loaded.

The gradient needs the mix and the log-sum-exp of the forward pass and nothing
else: logits are computed again from the source that is in VMEM anyway (with the
mix o of a read, see `deltajax.routing.streaming`):

    dlogit_i = alpha_i (<do, x_i - o> + dlse)
    dx_i     = alpha_i do + dlogit_i rstd_i (q - x_i rstd_i^2 <q, x_i> / K)

dx is added to the gradient of the memory in place. The gradient of the queries
is summed over the sources and tokens of a tile on chip, over tiles by XLA: the
order is fixed, and two runs give the same bits.

Bytes for each token and source: forward one read; backward two reads and one
write. For each token: forward R mixes and R H scalars written; backward 2 R
mixes and 2 R H scalars read.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size,
G = R H logits of a source, Q rows of queries (G, padded).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from deltajax.kernels import MASKED, without_x64

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
  queries = 2 * (4 + 3 * 2) * _query_rows(reads, heads) * lanes
  if backward:
    vectors = 2 * item * (3 + 2 * reads)
    queries += 2 * 4 * _query_rows(reads, heads) * lanes  # their gradient
  else:
    vectors = 2 * item * (1 + reads) + 4 * reads
  # Statistics lie in columns: each takes a whole row of lanes.
  statistics = 4 * 4 * -(-_query_rows(reads, heads) // LANES) * LANES
  budget = int(BLOCKS_SHARE * vmem_bytes(device_kind))
  # Numbers of a token lie in lanes: a tile is a multiple of these, or all.
  sizes = [n for n in (512, 256, LANES) if n <= length] or [length]
  for tokens in sizes:
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


@without_x64
def read_forward(
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  heads: int,
  eps: float,
  *,
  device_kind: str,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Reads the visible slots.

  Args:
    queries_RxK: query times key norm weight, for each read.
    slots_SxBxTxD: the memory; S at least 1.
    visible_R: int32, how many slots each read sees.
    heads: H.
    eps: of the key norm.
    device_kind: of the TPU, such as `TPU v5 lite`.
    interpret: run without a TPU, slowly.

  Returns:
    mix_RxBxTxD in the dtype of the memory, and lse_RxHxBxT in float32; where
    nothing is visible 0 and -1e30.
  """
  plan = _Plan.make(
    queries_RxK, slots_SxBxTxD, visible_R, heads, eps, False, device_kind
  )
  _, batch, length, width = slots_SxBxTxD.shape
  reads = len(queries_RxK)
  mix_RxBxTxD, lse_BxGxT = pl.pallas_call(
    partial(_forward_kernel, case=plan.case),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=plan.grid,
      in_specs=[*plan.queries.specs(), plan.source],
      out_specs=[plan.mixes, plan.scalars(reads * heads)],
      scratch_shapes=[
        plan.columns,
        plan.columns,
        pltpu.VMEM((reads, plan.case.tile.tokens, width), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((reads, batch, length, width), slots_SxBxTxD.dtype),
      jax.ShapeDtypeStruct((batch, reads * heads, length), jnp.float32),
    ],
    compiler_params=plan.compiler_params,
    interpret=interpret,
    name="depth_attention_forward",
  )(visible_R, *plan.queries.arrays, slots_SxBxTxD)
  return mix_RxBxTxD, _by_read(lse_BxGxT, heads)


@without_x64
def read_backward(
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  mix_RxBxTxD: jax.Array,
  lse_RxHxBxT: jax.Array,
  d_mix_RxBxTxD: jax.Array,
  d_lse_RxHxBxT: jax.Array,
  d_slots_SxBxTxD: jax.Array,
  heads: int,
  eps: float,
  *,
  device_kind: str,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The gradient of `read_forward`.

  Args:
    queries_RxK: as for `read_forward`.
    slots_SxBxTxD: as for `read_forward`.
    visible_R: as for `read_forward`.
    mix_RxBxTxD: what it returned.
    lse_RxHxBxT: what it returned.
    d_mix_RxBxTxD: their gradients.
    d_lse_RxHxBxT: their gradients.
    d_slots_SxBxTxD: the gradient of the memory so far; given up.
    heads: H.
    eps: of the key norm.
    device_kind: of the TPU, such as `TPU v5 lite`.
    interpret: run without a TPU, slowly.

  Returns:
    d_queries_RxK, float32, and d_slots_SxBxTxD with the read's part added.
  """
  plan = _Plan.make(
    queries_RxK, slots_SxBxTxD, visible_R, heads, eps, True, device_kind
  )
  reads, key_size = queries_RxK.shape
  rows, width = plan.queries.rows, slots_SxBxTxD.shape[-1]
  batch, num_tiles, _ = plan.grid
  scalars = plan.scalars(rows)
  inputs = [
    visible_R,
    *plan.queries.arrays,
    slots_SxBxTxD,
    mix_RxBxTxD,
    d_mix_RxBxTxD,
    _by_batch(lse_RxHxBxT, rows),
    _by_batch(d_lse_RxHxBxT, rows),
    d_slots_SxBxTxD,
  ]
  d_slots_SxBxTxD, d_queries = pl.pallas_call(
    partial(_backward_kernel, case=plan.case),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=plan.grid,
      in_specs=[
        *plan.queries.specs(),
        plan.source,
        plan.mixes,
        plan.mixes,
        scalars,
        scalars,
        plan.source,
      ],
      out_specs=[
        plan.source,
        pl.BlockSpec((1, 1, rows, width), lambda b, t, s, _: (b, t, 0, 0)),
      ],
      scratch_shapes=[plan.columns, plan.columns],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(d_slots_SxBxTxD.shape, d_slots_SxBxTxD.dtype),
      jax.ShapeDtypeStruct((batch, num_tiles, rows, width), jnp.float32),
    ],
    input_output_aliases={len(inputs) - 1: 0},
    compiler_params=plan.compiler_params,
    interpret=interpret,
    name="depth_attention_backward",
  )(*inputs)
  d_queries_GxD = jnp.sum(d_queries, (0, 1))[: reads * heads]
  return _fold_queries(d_queries_GxD, reads, key_size), d_slots_SxBxTxD


class _Case(NamedTuple):
  """What is static about a call."""

  length: int
  reads: int
  heads: int
  key_size: int
  eps: float
  tile: Tile


class _Queries(NamedTuple):
  """Queries as the kernels want them.

  Attributes:
    rows: Q.
    arrays: [Q, D] in float32, zero outside of a head's keys; then, for a
      bfloat16 memory, [3 Q, D] in bfloat16: parts of each whose sum it is.
  """

  rows: int
  arrays: tuple[jax.Array, ...]

  @classmethod
  def make(cls, queries_RxK, width: int, heads: int, dtype: Any) -> "_Queries":
    reads, key_size = queries_RxK.shape
    rows = _query_rows(reads, heads)
    channel = jnp.arange(key_size) // (key_size // heads)
    own_HxK = channel == jnp.arange(heads)[:, None]
    wide = jnp.where(own_HxK, queries_RxK.astype(jnp.float32)[:, None], 0)
    wide_QxD = jnp.zeros((rows, width), jnp.float32)
    wide_QxD = wide_QxD.at[: reads * heads, width - key_size :].set(
      wide.reshape(-1, key_size)
    )
    if dtype != jnp.bfloat16:
      return cls(rows, (wide_QxD,))
    return cls(rows, (wide_QxD, jnp.concatenate(_bfloat16_parts(wide_QxD))))

  def specs(self) -> list[pl.BlockSpec]:
    return [pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in self.arrays]


class _Plan(NamedTuple):
  """What both kernels are called with.

  Attributes:
    case: what is static.
    queries: as the kernels want them.
    grid: over batch, tiles of tokens, and sources.
    source: block of the memory, or of its gradient.
    mixes: block of the mixes of all reads, or of their gradients.
    columns: scratch for a number of each token and logit.
    compiler_params: of the TPU compiler.
  """

  case: _Case
  queries: _Queries
  grid: tuple[Any, ...]
  source: pl.BlockSpec
  mixes: pl.BlockSpec
  columns: Any
  compiler_params: pltpu.CompilerParams

  @classmethod
  def make(
    cls, queries_RxK, slots, visible_R, heads, eps, backward, device_kind
  ) -> "_Plan":
    _, batch, length, width = slots.shape
    reads, key_size = queries_RxK.shape
    tile = choose_tile(
      length, width, reads, heads, slots.dtype, backward, device_kind
    )
    queries = _Queries.make(queries_RxK, width, heads, slots.dtype)
    return cls(
      case=_Case(length, reads, heads, key_size, eps, tile),
      queries=queries,
      # At least one source, masked, so that every output is written.
      grid=(
        batch,
        pl.cdiv(length, tile.tokens),
        jnp.maximum(jnp.max(visible_R), 1),
      ),
      source=pl.BlockSpec(
        (1, 1, tile.tokens, width), lambda b, t, s, _: (s, b, t, 0)
      ),
      mixes=pl.BlockSpec(
        (reads, 1, tile.tokens, width), lambda b, t, s, _: (0, b, t, 0)
      ),
      columns=pltpu.VMEM((tile.tokens, queries.rows), jnp.float32),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=int(LIMIT_SHARE * vmem_bytes(device_kind)),
      ),
    )

  def scalars(self, rows: int) -> pl.BlockSpec:
    """Block of some numbers of each token: `rows` of [B, rows, T]."""
    return pl.BlockSpec(
      (1, rows, self.case.tile.tokens), lambda b, t, s, _: (b, 0, t)
    )


def _query_rows(reads: int, heads: int) -> int:
  return -(-reads * heads // SUBLANES) * SUBLANES


def _fold_queries(d_queries_GxD, reads: int, key_size: int) -> jax.Array:
  """Gradients [G, D], each zero outside of a head's keys, as [R, K]."""
  width = d_queries_GxD.shape[-1]
  heads = len(d_queries_GxD) // reads
  d_keys = d_queries_GxD[:, width - key_size :].reshape(
    reads, heads, heads, key_size // heads
  )
  own = jnp.arange(heads)
  return d_keys[:, own, own].reshape(reads, key_size)


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
  """Three bfloat16 arrays whose sum is a float32 array."""
  parts = []
  for _ in range(3):
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts


def _by_read(x_BxGxT, heads: int) -> jax.Array:
  batch, _, length = x_BxGxT.shape
  return x_BxGxT.swapaxes(0, 1).reshape(-1, heads, batch, length)


def _by_batch(x_RxHxBxT, rows: int) -> jax.Array:
  """As [B, Q, T]."""
  batch, length = x_RxHxBxT.shape[2:]
  x_GxBxT = x_RxHxBxT.reshape(-1, batch, length)
  x_QxBxT = jnp.pad(x_GxBxT, ((0, rows - len(x_GxBxT)), (0, 0), (0, 0)))
  return x_QxBxT.swapaxes(0, 1)


def _forward_kernel(visible_ref, *refs, case: _Case):
  *queries, x_ref, mix_ref, lse_ref, max_ref, sum_ref, acc_ref = refs
  source, first_token = pl.program_id(2), _first_token(case)

  @pl.when(source == 0)
  def _():
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  seen = _seen(visible_ref, source, case, max_ref.shape[-1])

  @_for_chunks(case)
  def _(rows, start):
    x = _load_source(x_ref, rows, first_token + start, case)
    wide = x.astype(jnp.float32)
    logit, _ = _logits(x, wide, queries, case)
    logit = jnp.where(seen, logit, MASKED)
    above = logit - max_ref[rows, :]
    rescale = jnp.exp(jnp.minimum(-above, 0))
    weight = jnp.where(seen, jnp.exp(jnp.minimum(above, 0)), 0)
    max_ref[rows, :] = jnp.maximum(max_ref[rows, :], logit)
    sum_ref[rows, :] = rescale * sum_ref[rows, :] + weight
    for r in range(case.reads):
      acc_ref[r, rows, :] = (
        _per_channel(rescale, r, case, wide.shape) * acc_ref[r, rows, :]
        + _per_channel(weight, r, case, wide.shape) * wide
      )

  @pl.when(source == pl.num_programs(2) - 1)
  def _():
    total = jnp.where(sum_ref[...] > 0, sum_ref[...], 1)
    lse = max_ref[...] + jnp.log(total)
    lse_ref[0] = lse.T[: case.reads * case.heads]
    sum_ref[...] = 1 / total

    @_for_chunks(case)
    def _(rows, start):
      del start
      scale = sum_ref[rows, :]
      for r in range(case.reads):
        acc = acc_ref[r, rows, :]
        mixed = _per_channel(scale, r, case, acc.shape) * acc
        mix_ref[r, 0, rows, :] = mixed.astype(mix_ref.dtype)


def _backward_kernel(visible_ref, *refs, case: _Case):
  (
    *queries,
    x_ref,
    mix_ref,
    d_mix_ref,
    lse_ref,
    d_lse_ref,
    d_old_ref,
    d_new_ref,
    d_queries_ref,
    lse_column_ref,
    d_lse_column_ref,
  ) = refs
  source, first_token = pl.program_id(2), _first_token(case)

  @pl.when(source == 0)
  def _():
    d_queries_ref[...] = jnp.zeros_like(d_queries_ref)
    for column_ref, row_ref in (
      (lse_column_ref, lse_ref),
      (d_lse_column_ref, d_lse_ref),
    ):
      column_ref[...] = row_ref[0].T

  seen = _seen(visible_ref, source, case, lse_column_ref.shape[-1])

  @_for_chunks(case)
  def _(rows, start):
    x = _load_source(x_ref, rows, first_token + start, case)
    wide = x.astype(jnp.float32)
    logit, rstd = _logits(x, wide, queries, case)
    logit = jnp.where(seen, logit, MASKED)
    alpha = jnp.where(seen, jnp.exp(logit - lse_column_ref[rows, :]), 0)
    lane = lax.broadcasted_iota(jnp.int32, alpha.shape, 1)
    off_mix = d_lse_column_ref[rows, :]
    d_mixes = []
    for r in range(case.reads):
      d_mix = d_mix_ref[r, 0, rows, :].astype(jnp.float32)
      off = d_mix * (wide - mix_ref[r, 0, rows, :].astype(jnp.float32))
      for h in range(case.heads):
        part = jnp.sum(_head(off, h, case), axis=-1, keepdims=True)
        off_mix += jnp.where(lane == r * case.heads + h, part, 0)
      d_mixes.append(d_mix)
    d_logit = alpha * off_mix
    d_dot = d_logit * rstd
    shrink = jnp.sum(
      jnp.where(seen, d_logit * logit, 0), axis=-1, keepdims=True
    )
    shrink *= rstd * rstd / case.key_size
    d_x = -_keys_only(wide, case) * shrink
    for g in range(case.reads * case.heads):
      d_x += d_dot[:, g : g + 1] * queries[0][g : g + 1, :]
    for r, d_mix in enumerate(d_mixes):
      d_x += _per_channel(alpha, r, case, d_mix.shape) * d_mix
    d_old = d_old_ref[0, 0, rows, :].astype(jnp.float32)
    d_new_ref[0, 0, rows, :] = (d_old + d_x).astype(d_new_ref.dtype)
    if case.length % case.tile.tokens:
      inside = _inside(first_token + start, d_dot.shape, case)
      d_dot = jnp.where(inside, d_dot, 0)
    d_queries_ref[0, 0] += _sum_over_tokens(d_dot, x)


def _for_chunks(case: _Case):
  """Decorates what is done for each chunk of rows: f(slice, first row)."""
  count = case.tile.tokens // case.tile.rows

  def run(body):
    if count == 1:
      body(slice(None), 0)
      return

    def step(i, _):
      start = pl.multiple_of(i * case.tile.rows, case.tile.rows)
      body(pl.ds(start, case.tile.rows), start)

    lax.fori_loop(0, count, step, None)

  return run


def _seen(visible_ref, source, case: _Case, num_lanes: int):
  """Which logits count for this source: bool [1, Q]."""
  lane = lax.broadcasted_iota(jnp.int32, (1, num_lanes), 1)
  seen = jnp.zeros((1, num_lanes), jnp.bool_)
  for r in range(case.reads):
    first = r * case.heads
    own = (lane >= first) & (lane < first + case.heads)
    seen |= own & (source < visible_ref[r])
  return seen


def _load_source(x_ref, rows, first_token, case: _Case):
  x = x_ref[0, 0, rows, :]
  if case.length % case.tile.tokens:
    # Rows beyond the end hold anything; they must not reach a sum.
    x = jnp.where(_inside(first_token, x.shape, case), x, jnp.zeros_like(x))
  return x


def _first_token(case: _Case):
  """Of this tile."""
  return pl.program_id(1) * case.tile.tokens


def _inside(first_token, shape, case: _Case):
  """Which rows, from a token on, are before the end of the sequence."""
  token = first_token + lax.broadcasted_iota(jnp.int32, shape, 0)
  return token < case.length


def _logits(x, wide, queries, case: _Case):
  """Logits [rows, Q], and rstd [rows, 1]."""
  squares = _keys_only(wide * wide, case)
  mean = jnp.sum(squares, axis=-1, keepdims=True) / case.key_size
  rstd = lax.rsqrt(mean + case.eps)
  contract = (((1,), (1,)), ((), ()))
  if len(queries) == 1:
    dot = lax.dot_general(
      wide,
      queries[0][...],
      contract,
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    return dot * rstd, rstd
  # A bfloat16 source is exact in one pass of the MXU, its query in three parts.
  parts = lax.dot_general(
    x, queries[1][...], contract, preferred_element_type=jnp.float32
  )
  q = queries[0].shape[0]
  dot = parts[:, :q] + parts[:, q : 2 * q] + parts[:, 2 * q :]
  return dot * rstd, rstd


def _sum_over_tokens(d_dot, x):
  """Products [Q, D] of [rows, Q] and [rows, D]."""
  contract = (((0,), (0,)), ((), ()))
  if x.dtype != jnp.bfloat16:
    return lax.dot_general(
      d_dot,
      x,
      contract,
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
  return sum(
    lax.dot_general(part, x, contract, preferred_element_type=jnp.float32)
    for part in _bfloat16_parts(d_dot)
  )


def _keys_only(x, case: _Case):
  if case.key_size == x.shape[-1]:
    return x
  channel = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where(channel >= x.shape[-1] - case.key_size, x, 0)


def _head(x, h: int, case: _Case):
  """The channels of a head, others zero."""
  if case.heads == 1:
    return x
  size = x.shape[-1] // case.heads
  channel = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where((channel >= h * size) & (channel < (h + 1) * size), x, 0)


def _per_channel(column, r: int, case: _Case, shape):
  """Spreads a read's statistics [rows, H] over [rows, D]."""
  first = r * case.heads
  spread = column[:, first : first + 1]
  if case.heads == 1:
    return spread
  size = shape[-1] // case.heads
  channel = lax.broadcasted_iota(jnp.int32, shape, 1)
  spread = jnp.broadcast_to(spread, shape)
  for h in range(1, case.heads):
    own = column[:, first + h : first + h + 1]
    spread = jnp.where(channel >= h * size, own, spread)
  return spread
