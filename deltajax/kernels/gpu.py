"""Depth attention on NVIDIA GPUs: one pass of R reads over the depth memory.

Written in Pallas for Triton, which XLA runs from compute capability 8.0
(Ampere) up.
A program takes a few tokens, whole vectors of them, and goes over the sources
that they see; all reads and heads take what they need of a source while it is
in registers, and an online softmax makes one mix of each. A width is masked up
to a power of two; how many tokens, and what stays in registers, says
`deltajax.kernels.gpu_plan`.

The gradient is that of `deltajax.kernels.tpu`, which see. A program of the
backward pass takes one tile of tokens after the other and sums the gradient of
the queries over all of them in registers; XLA sums over programs. There are no
atomics: the order is fixed, and two runs give the same bits.

Shapes: N tokens (batch times sequence), D width, S slots, R reads, H heads, K
key size, G = R H logits of a source.
"""

from collections.abc import Callable
from functools import partial
import importlib
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from deltajax.kernels import MASKED, without_x64
from deltajax.kernels.gpu_plan import choose_tile, Tile

_X = TypeVar("_X")

# Programs of the backward pass, at most: each leaves one gradient of the
# queries. About two for each multiprocessor of a large GPU.
BACKWARD_PROGRAMS = 256


def _find_triton() -> Any:
  try:
    return importlib.import_module("jax.experimental.pallas.triton")
  except ImportError:
    return None


# JAX is going to drop it; whoever needs it asks `unavailable` first.
plgpu = _find_triton()


def unavailable() -> str | None:
  """Why the kernels cannot be built with this JAX, or None."""
  if plgpu is None:
    return f"JAX {jax.__version__} has no jax.experimental.pallas.triton"
  return None


@without_x64
def read_forward(
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  heads: int,
  eps: float,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Reads the visible slots.

  Args:
    queries_RxK: query times key norm weight, for each read.
    slots_SxBxTxD: the memory; S at least 1.
    visible_R: int32, how many slots each read sees.
    heads: H.
    eps: of the key norm.
    interpret: run without a GPU, slowly.

  Returns:
    mix_RxBxTxD in the dtype of the memory, and lse_RxHxBxT in float32; where
    nothing is visible 0 and -1e30.

  Raises:
    ValueError: if no tile fits, see `gpu_plan.choose_tile`.
  """
  num_slots, batch, length, width = slots_SxBxTxD.shape
  reads, key_size = queries_RxK.shape
  num_tokens = batch * length
  tile = choose_tile(num_tokens, width, reads, heads, backward=False)
  case = _Case(num_tokens, width, reads, heads, key_size, eps, tile)
  mix_RxNxD, lse_GxN = pl.pallas_call(
    partial(_forward_kernel, case=case),
    grid=(pl.cdiv(num_tokens, tile.tokens),),
    out_shape=[
      jax.ShapeDtypeStruct((reads, num_tokens, width), slots_SxBxTxD.dtype),
      jax.ShapeDtypeStruct((reads * heads, num_tokens), jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=2),
    interpret=interpret,
    name="depth_attention_forward",
  )(
    visible_R,
    queries_RxK.astype(jnp.float32),
    slots_SxBxTxD.reshape(num_slots, num_tokens, width),
  )
  return (
    mix_RxNxD.reshape(reads, batch, length, width),
    lse_GxN.reshape(reads, heads, batch, length),
  )


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
    interpret: run without a GPU, slowly.

  Returns:
    d_queries_RxK, float32, and d_slots_SxBxTxD with the read's part added.

  Raises:
    ValueError: if no tile fits, see `gpu_plan.choose_tile`.
  """
  num_slots, batch, length, width = slots_SxBxTxD.shape
  reads, key_size = queries_RxK.shape
  num_tokens = batch * length
  tile = choose_tile(num_tokens, width, reads, heads, backward=True)
  case = _Case(num_tokens, width, reads, heads, key_size, eps, tile)
  num_tiles = pl.cdiv(num_tokens, tile.tokens)
  programs = min(num_tiles, BACKWARD_PROGRAMS)
  memory = (num_slots, num_tokens, width)
  mixes = (reads, num_tokens, width)
  scalars = (reads * heads, num_tokens)
  inputs = (
    visible_R,
    queries_RxK.astype(jnp.float32),
    slots_SxBxTxD.reshape(memory),
    mix_RxBxTxD.reshape(mixes),
    d_mix_RxBxTxD.reshape(mixes),
    lse_RxHxBxT.reshape(scalars),
    d_lse_RxHxBxT.reshape(scalars),
    d_slots_SxBxTxD.reshape(memory),
  )
  d_slots, d_queries_PxRxK = pl.pallas_call(
    partial(_backward_kernel, case=case, tiles=pl.cdiv(num_tiles, programs)),
    grid=(programs,),
    out_shape=[
      jax.ShapeDtypeStruct(memory, d_slots_SxBxTxD.dtype),
      jax.ShapeDtypeStruct((programs, reads, key_size), jnp.float32),
    ],
    input_output_aliases={len(inputs) - 1: 0},
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=2),
    interpret=interpret,
    name="depth_attention_backward",
  )(*inputs)
  return d_queries_PxRxK.sum(0), d_slots.reshape(slots_SxBxTxD.shape)


class _Case(NamedTuple):
  """What is static about a call."""

  num_tokens: int
  width: int
  reads: int
  heads: int
  key_size: int
  eps: float
  tile: Tile

  def head(self, h: int) -> jax.Array:
    """Which channels of a value belong to a head: [1, D]."""
    size = self.width // self.heads
    channel = jnp.arange(self.tile.channels)[None]
    return (channel >= h * size) & (channel < (h + 1) * size)

  def key(self) -> jax.Array:
    """The element of a key that a channel is; negative before the first."""
    return jnp.arange(self.tile.channels) - (self.width - self.key_size)

  def in_key(self) -> jax.Array:
    """Which channels belong to a key: [D]."""
    return (self.key() >= 0) & (self.key() < self.key_size)

  def in_head_key(self, h: int) -> jax.Array:
    """Which channels belong to a head's part of a key: [D]."""
    size = self.key_size // self.heads
    return (self.key() >= h * size) & (self.key() < (h + 1) * size)


class _Tokens(NamedTuple):
  """The tokens of a tile, and where their vectors lie."""

  rows: jax.Array
  columns: jax.Array
  valid_rows: jax.Array
  valid: jax.Array

  @classmethod
  def make(cls, index, case: _Case) -> "_Tokens":
    rows = index * case.tile.tokens + jnp.arange(case.tile.tokens)
    columns = jnp.arange(case.tile.channels)
    valid_rows = rows < case.num_tokens
    return cls(
      rows,
      columns,
      valid_rows,
      valid_rows[:, None] & (columns < case.width)[None],
    )

  def load(self, ref, i) -> jax.Array:
    """Vectors [tokens, D] of a source or read, float32."""
    x = plgpu.load(
      ref.at[i, self.rows[:, None], self.columns[None]],
      mask=self.valid,
      other=0,
    )
    return x.astype(jnp.float32)

  def store(self, ref, i, x) -> None:
    """Writes vectors [tokens, D]."""
    plgpu.store(
      ref.at[i, self.rows[:, None], self.columns[None]],
      x.astype(ref.dtype),
      mask=self.valid,
    )

  def load_scalars(self, ref, i) -> jax.Array:
    """Numbers [tokens]."""
    return plgpu.load(ref.at[i, self.rows], mask=self.valid_rows, other=0)


def _queries(queries_ref, case: _Case) -> Callable[[int, int], jax.Array]:
  """The query [1, D] of a read and head, zero where its key has nothing."""

  def load(r, h):
    query = plgpu.load(
      queries_ref.at[r, jnp.maximum(case.key(), 0)],
      mask=case.in_head_key(h),
      other=0,
    )
    return query[None]

  return _kept(case, load, np.ndindex(case.reads, case.heads))


def _kept(case: _Case, load: Callable[..., _X], arguments) -> Callable[..., _X]:
  """What `load` gives for these arguments; loaded now, if it stays."""
  if not case.tile.keeps:
    return load
  found = {of: load(*of) for of in arguments}
  return lambda *of: found[of]


def _rstd(x, case: _Case) -> jax.Array:
  squares = jnp.where(case.in_key(), x * x, 0)
  return lax.rsqrt(jnp.sum(squares, axis=1) / case.key_size + case.eps)


def _spread(scalars: list[jax.Array], case: _Case) -> jax.Array:
  """Numbers [tokens] of each head over its channels: [tokens, D]."""
  spread = scalars[0][:, None]
  for h in range(1, case.heads):
    spread = jnp.where(case.head(h), scalars[h][:, None], spread)
  return spread


def _num_visible(visible_ref, case: _Case) -> tuple[list[jax.Array], Any]:
  visible = [visible_ref[r] for r in range(case.reads)]
  most = visible[0]
  for count in visible[1:]:
    most = jnp.maximum(most, count)
  return visible, most


def _for_reads(case: _Case, function: Callable[[int, int], Any]) -> list:
  """[[f(r, h) for every head] for every read]."""
  return [
    [function(r, h) for h in range(case.heads)] for r in range(case.reads)
  ]


def _forward_kernel(
  visible_ref, queries_ref, slots_ref, mix_ref, lse_ref, *, case: _Case
):
  tile = _Tokens.make(pl.program_id(0), case)
  query = _queries(queries_ref, case)
  visible, most = _num_visible(visible_ref, case)

  def absorb(s, online):
    largest, total, mixes = online
    x = tile.load(slots_ref, s)
    rstd = _rstd(x, case)

    def logit(r, h):
      found = jnp.sum(query(r, h) * x, axis=1) * rstd
      return jnp.where(s < visible[r], found, MASKED)

    logits = _for_reads(case, logit)
    above = _for_reads(case, lambda r, h: logits[r][h] - largest[r][h])
    rescale = _for_reads(
      case, lambda r, h: jnp.exp(jnp.minimum(-above[r][h], 0))
    )
    weight = _for_reads(
      case,
      lambda r, h: jnp.where(
        s < visible[r], jnp.exp(jnp.minimum(above[r][h], 0)), 0
      ),
    )
    return (
      _for_reads(case, lambda r, h: jnp.maximum(largest[r][h], logits[r][h])),
      _for_reads(case, lambda r, h: rescale[r][h] * total[r][h] + weight[r][h]),
      [
        _spread(rescale[r], case) * mixes[r] + _spread(weight[r], case) * x
        for r in range(case.reads)
      ],
    )

  zeros = jnp.zeros((case.tile.tokens,), jnp.float32)
  largest, total, mixes = lax.fori_loop(
    0,
    most,
    absorb,
    (
      _for_reads(case, lambda r, h: zeros + MASKED),
      _for_reads(case, lambda r, h: zeros),
      [jnp.zeros((case.tile.tokens, case.tile.channels), jnp.float32)]
      * case.reads,
    ),
  )
  for r in range(case.reads):
    sums = [jnp.where(x > 0, x, 1) for x in total[r]]
    tile.store(mix_ref, r, mixes[r] * _spread([1 / x for x in sums], case))
    for h in range(case.heads):
      plgpu.store(
        lse_ref.at[r * case.heads + h, tile.rows],
        largest[r][h] + jnp.log(sums[h]),
        mask=tile.valid_rows,
      )


def _backward_kernel(
  visible_ref,
  queries_ref,
  slots_ref,
  mix_ref,
  d_mix_ref,
  lse_ref,
  d_lse_ref,
  d_old_ref,
  d_new_ref,
  d_queries_ref,
  *,
  case: _Case,
  tiles: int,
):
  program = pl.program_id(0)
  query = _queries(queries_ref, case)
  visible, most = _num_visible(visible_ref, case)

  def tile_gradient(i, d_queries):
    tile = _Tokens.make(program * tiles + i, case)
    every_read = list(np.ndindex(case.reads))
    mix = _kept(case, partial(tile.load, mix_ref), every_read)
    d_mix = _kept(case, partial(tile.load, d_mix_ref), every_read)

    def at(ref):
      return _for_reads(
        case, lambda r, h: tile.load_scalars(ref, r * case.heads + h)
      )

    lse, d_lse = at(lse_ref), at(d_lse_ref)

    def source_gradient(s, d_queries):
      x = tile.load(slots_ref, s)
      rstd = _rstd(x, case)
      shrink = jnp.zeros((case.tile.tokens,), jnp.float32)
      d_x = tile.load(d_old_ref, s)
      new_d_queries = []
      for r in range(case.reads):
        d_mixed = d_mix(r)
        off = d_mixed * (x - mix(r))
        alphas = []
        d_query = d_queries[r]
        for h in range(case.heads):
          logit = jnp.sum(query(r, h) * x, axis=1) * rstd
          seen = tile.valid_rows & (s < visible[r])
          logit = jnp.where(seen, logit, MASKED)
          alpha = jnp.where(seen, jnp.exp(logit - lse[r][h]), 0)
          own = off if case.heads == 1 else jnp.where(case.head(h), off, 0)
          d_logit = alpha * (jnp.sum(own, axis=1) + d_lse[r][h])
          # Rows beyond the end may have an rstd of infinity.
          d_dot = jnp.where(seen, d_logit * rstd, 0)
          shrink += jnp.where(seen, d_logit * logit, 0)
          d_x += d_dot[:, None] * query(r, h)
          own = x if case.heads == 1 else jnp.where(case.in_head_key(h), x, 0)
          d_query += jnp.sum(d_dot[:, None] * own, axis=0)
          alphas.append(alpha)
        d_x += _spread(alphas, case) * d_mixed
        new_d_queries.append(d_query)
      shrink *= rstd * rstd / case.key_size
      d_x -= jnp.where(case.in_key(), x, 0) * shrink[:, None]
      tile.store(d_new_ref, s, d_x)
      return new_d_queries

    return lax.fori_loop(0, most, source_gradient, d_queries)

  nothing = [jnp.zeros((case.tile.channels,), jnp.float32)] * case.reads
  d_queries = lax.fori_loop(0, tiles, tile_gradient, nothing)
  for r in range(case.reads):
    plgpu.store(
      d_queries_ref.at[program, r, jnp.maximum(case.key(), 0)],
      d_queries[r],
      mask=case.in_key(),
    )
