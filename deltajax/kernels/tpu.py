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

Vectors moved for each token and source: forward one read; backward two reads
and one write. For each token: forward R mixes written; backward 2 R read. Tiles
and blocks, and the count from them, are those of `deltajax.kernels.tpu_plan`.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size,
G = R H logits of a source, Q rows of queries (G, padded).
"""

from functools import partial

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from deltajax.kernels import MASKED, without_x64
from deltajax.kernels.tpu_plan import Plan


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
  plan = Plan.make(
    queries_RxK,
    slots_SxBxTxD,
    heads,
    eps,
    backward=False,
    device_kind=device_kind,
  )
  mix_RxBxTxD, lse = _call(
    _forward_kernel,
    plan,
    visible_R,
    (*_query_arrays(queries_RxK, plan), slots_SxBxTxD),
    [
      *_columns(plan),
      pltpu.VMEM((plan.reads, plan.tile.tokens, plan.width), jnp.float32),
    ],
    interpret=interpret,
    name="depth_attention_forward",
  )
  return mix_RxBxTxD, _by_read(lse, plan)


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
  plan = Plan.make(
    queries_RxK,
    slots_SxBxTxD,
    heads,
    eps,
    backward=True,
    device_kind=device_kind,
  )
  inputs = (
    *_query_arrays(queries_RxK, plan),
    slots_SxBxTxD,
    mix_RxBxTxD,
    d_mix_RxBxTxD,
    _by_tile(lse_RxHxBxT, plan),
    _by_tile(d_lse_RxHxBxT, plan),
    d_slots_SxBxTxD,
  )
  d_slots_SxBxTxD, d_queries = _call(
    _backward_kernel,
    plan,
    visible_R,
    inputs,
    _columns(plan),
    input_output_aliases={len(inputs): 0},  # visible_R comes before these
    interpret=interpret,
    name="depth_attention_backward",
  )
  d_queries_GxD = jnp.sum(d_queries, (0, 1))[: plan.logits]
  return _fold_queries(d_queries_GxD, plan), d_slots_SxBxTxD


def _call(kernel, plan: Plan, visible_R, inputs, scratch, **options):
  """Runs a kernel over its grid."""
  # At least one source, masked, so that every output is written.
  num_sources = jnp.maximum(jnp.max(visible_R), 1)
  return pl.pallas_call(
    partial(kernel, plan=plan),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(plan.batch, plan.num_tiles, num_sources),
      in_specs=[x.spec for x in plan.inputs],
      out_specs=[x.spec for x in plan.outputs],
      scratch_shapes=scratch,
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.outputs],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=plan.vmem_limit,
    ),
    **options,
  )(visible_R, *inputs)


def _columns(plan: Plan) -> list:
  """Scratch for two numbers of each token and logit."""
  return [pltpu.VMEM((plan.tile.tokens, plan.rows), jnp.float32)] * 2


def _query_arrays(queries_RxK, plan: Plan) -> tuple[jax.Array, ...]:
  """Queries as the kernels want them.

  Returns:
    [Q, D] in float32, zero outside of a head's keys; then, for a bfloat16
    memory, [3 Q, D] in bfloat16: parts of each whose sum it is.
  """
  channel = jnp.arange(plan.key_size) // (plan.key_size // plan.heads)
  own_HxK = channel == jnp.arange(plan.heads)[:, None]
  wide = jnp.where(own_HxK, queries_RxK.astype(jnp.float32)[:, None], 0)
  wide_QxD = jnp.zeros((plan.rows, plan.width), jnp.float32)
  wide_QxD = wide_QxD.at[: plan.logits, plan.width - plan.key_size :].set(
    wide.reshape(-1, plan.key_size)
  )
  if plan.dtype != jnp.bfloat16:
    return (wide_QxD,)
  return wide_QxD, jnp.concatenate(_bfloat16_parts(wide_QxD))


def _fold_queries(d_queries_GxD, plan: Plan) -> jax.Array:
  """Gradients [G, D], each zero outside of a head's keys, as [R, K]."""
  heads, key_size = plan.heads, plan.key_size
  d_keys = d_queries_GxD[:, plan.width - key_size :].reshape(
    plan.reads, heads, heads, key_size // heads
  )
  own = jnp.arange(heads)
  return d_keys[:, own, own].reshape(plan.reads, key_size)


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
  """Three bfloat16 arrays whose sum is a float32 array."""
  parts = []
  for _ in range(3):
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts


def _by_read(x, plan: Plan) -> jax.Array:
  """Numbers of each token as [R, H, B, T], of [B, tiles, G, tokens]."""
  x_GxBxT = jnp.moveaxis(x, 2, 0).reshape(plan.logits, plan.batch, -1)
  x_GxBxT = x_GxBxT[:, :, : plan.length]
  return x_GxBxT.reshape(plan.reads, plan.heads, plan.batch, plan.length)


def _by_tile(x_RxHxBxT, plan: Plan) -> jax.Array:
  """As [B, tiles, Q, tokens]."""
  x_GxBxT = x_RxHxBxT.reshape(plan.logits, plan.batch, plan.length)
  tokens = plan.num_tiles * plan.tile.tokens
  more = ((0, plan.rows - plan.logits), (0, 0), (0, tokens - plan.length))
  x = jnp.pad(x_GxBxT, more)
  x = x.reshape(plan.rows, plan.batch, plan.num_tiles, plan.tile.tokens)
  return jnp.moveaxis(x, 0, 2)


def _forward_kernel(visible_ref, *refs, plan: Plan):
  *queries, x_ref, mix_ref, lse_ref, max_ref, sum_ref, acc_ref = refs
  source, first_token = pl.program_id(2), _first_token(plan)

  @pl.when(source == 0)
  def _():
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  seen = _seen(visible_ref, source, plan, max_ref.shape[-1])

  @_for_chunks(plan)
  def _(rows, start):
    x = _load_source(x_ref, rows, first_token + start, plan)
    wide = x.astype(jnp.float32)
    logit, _ = _logits(x, wide, queries, plan)
    logit = jnp.where(seen, logit, MASKED)
    above = logit - max_ref[rows, :]
    rescale = jnp.exp(jnp.minimum(-above, 0))
    weight = jnp.where(seen, jnp.exp(jnp.minimum(above, 0)), 0)
    max_ref[rows, :] = jnp.maximum(max_ref[rows, :], logit)
    sum_ref[rows, :] = rescale * sum_ref[rows, :] + weight
    for r in range(plan.reads):
      acc_ref[r, rows, :] = (
        _per_channel(rescale, r, plan, wide.shape) * acc_ref[r, rows, :]
        + _per_channel(weight, r, plan, wide.shape) * wide
      )

  @pl.when(source == pl.num_programs(2) - 1)
  def _():
    total = jnp.where(sum_ref[...] > 0, sum_ref[...], 1)
    lse = max_ref[...] + jnp.log(total)
    lse_ref[0, 0] = lse.T[: plan.logits]
    sum_ref[...] = 1 / total

    @_for_chunks(plan)
    def _(rows, start):
      del start
      scale = sum_ref[rows, :]
      for r in range(plan.reads):
        acc = acc_ref[r, rows, :]
        mixed = _per_channel(scale, r, plan, acc.shape) * acc
        mix_ref[r, 0, rows, :] = mixed.astype(mix_ref.dtype)


def _backward_kernel(visible_ref, *refs, plan: Plan):
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
  source, first_token = pl.program_id(2), _first_token(plan)

  @pl.when(source == 0)
  def _():
    d_queries_ref[...] = jnp.zeros_like(d_queries_ref)
    for column_ref, row_ref in (
      (lse_column_ref, lse_ref),
      (d_lse_column_ref, d_lse_ref),
    ):
      column_ref[...] = row_ref[0, 0].T

  seen = _seen(visible_ref, source, plan, lse_column_ref.shape[-1])

  @_for_chunks(plan)
  def _(rows, start):
    x = _load_source(x_ref, rows, first_token + start, plan)
    wide = x.astype(jnp.float32)
    logit, rstd = _logits(x, wide, queries, plan)
    logit = jnp.where(seen, logit, MASKED)
    alpha = jnp.where(seen, jnp.exp(logit - lse_column_ref[rows, :]), 0)
    lane = lax.broadcasted_iota(jnp.int32, alpha.shape, 1)
    off_mix = d_lse_column_ref[rows, :]
    d_mixes = []
    for r in range(plan.reads):
      d_mix = d_mix_ref[r, 0, rows, :].astype(jnp.float32)
      off = d_mix * (wide - mix_ref[r, 0, rows, :].astype(jnp.float32))
      for h in range(plan.heads):
        part = jnp.sum(_head(off, h, plan), axis=-1, keepdims=True)
        off_mix += jnp.where(lane == r * plan.heads + h, part, 0)
      d_mixes.append(d_mix)
    d_logit = alpha * off_mix
    d_dot = d_logit * rstd
    shrink = jnp.sum(
      jnp.where(seen, d_logit * logit, 0), axis=-1, keepdims=True
    )
    shrink *= rstd * rstd / plan.key_size
    d_x = -_keys_only(wide, plan) * shrink
    for g in range(plan.logits):
      d_x += d_dot[:, g : g + 1] * queries[0][g : g + 1, :]
    for r, d_mix in enumerate(d_mixes):
      d_x += _per_channel(alpha, r, plan, d_mix.shape) * d_mix
    d_old = d_old_ref[0, 0, rows, :].astype(jnp.float32)
    d_new_ref[0, 0, rows, :] = (d_old + d_x).astype(d_new_ref.dtype)
    if plan.length % plan.tile.tokens:
      inside = _inside(first_token + start, d_dot.shape, plan)
      d_dot = jnp.where(inside, d_dot, 0)
    d_queries_ref[0, 0] += _sum_over_tokens(d_dot, x)


def _for_chunks(plan: Plan):
  """Decorates what is done for each chunk of rows: f(slice, first row)."""
  count = plan.tile.tokens // plan.tile.rows

  def run(body):
    if count == 1:
      body(slice(None), 0)
      return

    def step(i, _):
      start = pl.multiple_of(i * plan.tile.rows, plan.tile.rows)
      body(pl.ds(start, plan.tile.rows), start)

    lax.fori_loop(0, count, step, None)

  return run


def _seen(visible_ref, source, plan: Plan, num_lanes: int):
  """Which logits count for this source: bool [1, Q]."""
  lane = lax.broadcasted_iota(jnp.int32, (1, num_lanes), 1)
  seen = jnp.zeros((1, num_lanes), jnp.bool_)
  for r in range(plan.reads):
    first = r * plan.heads
    own = (lane >= first) & (lane < first + plan.heads)
    seen |= own & (source < visible_ref[r])
  return seen


def _load_source(x_ref, rows, first_token, plan: Plan):
  x = x_ref[0, 0, rows, :]
  if plan.length % plan.tile.tokens:
    # Rows beyond the end hold anything; they must not reach a sum.
    x = jnp.where(_inside(first_token, x.shape, plan), x, jnp.zeros_like(x))
  return x


def _first_token(plan: Plan):
  """Of this tile."""
  return pl.program_id(1) * plan.tile.tokens


def _inside(first_token, shape, plan: Plan):
  """Which rows, from a token on, are before the end of the sequence."""
  token = first_token + lax.broadcasted_iota(jnp.int32, shape, 0)
  return token < plan.length


def _logits(x, wide, queries, plan: Plan):
  """Logits [rows, Q], and rstd [rows, 1]."""
  squares = _keys_only(wide * wide, plan)
  mean = jnp.sum(squares, axis=-1, keepdims=True) / plan.key_size
  rstd = lax.rsqrt(mean + plan.eps)
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


def _keys_only(x, plan: Plan):
  if plan.key_size == x.shape[-1]:
    return x
  channel = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where(channel >= x.shape[-1] - plan.key_size, x, 0)


def _head(x, h: int, plan: Plan):
  """The channels of a head, others zero."""
  if plan.heads == 1:
    return x
  size = x.shape[-1] // plan.heads
  channel = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where((channel >= h * size) & (channel < (h + 1) * size), x, 0)


def _per_channel(column, r: int, plan: Plan, shape):
  """Spreads a read's statistics [rows, H] over [rows, D]."""
  first = r * plan.heads
  spread = column[:, first : first + 1]
  if plan.heads == 1:
    return spread
  size = shape[-1] // plan.heads
  channel = lax.broadcasted_iota(jnp.int32, shape, 1)
  spread = jnp.broadcast_to(spread, shape)
  for h in range(1, plan.heads):
    own = column[:, first + h : first + h + 1]
    spread = jnp.where(channel >= h * size, own, spread)
  return spread
