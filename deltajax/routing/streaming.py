"""Depth attention in XLA, in two stages: read the memory, merge the rest.

`read_forward` goes over the visible slots one at a time with an online softmax,
so that invisible slots are never touched and no float32 copy of them exists.
What it returns stands for all slots that were read: one source whose value is
their mix and whose logit is the log-sum-exp of theirs. `merge` is the softmax
over it and the few sources that are not in the memory. Reads of several
sublayers can so share one pass over the slots that all of them see.

Gradients are written out (with the mix o of every read, and the gradient dlse
of its log-sum-exp, if it is a partial one):

    dlogit_i = alpha_i (<do, x_i - o> + dlse)
    dx_i     = alpha_i do + dlogit_i rstd_i (q - x_i rstd_i^2 <q, x_i> / K)
    dq       = sum over tokens and sources of dlogit_i rstd_i x_i

A lone source is its own mix, so that its query gets a gradient of exactly 0;
<do, x_i> - <do, o>, summed apart, would leave rounding. Logits and rstd are
computed again in the backward pass, which has the sources at hand anyway.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from deltajax.routing.partial_read import (
  MASKED,
  PartialRead,
  ReadCase,
  Single,
)


def read_forward(
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  case: ReadCase,
) -> PartialRead:
  """As `readers.Reader.forward`."""
  heads, eps = case.heads, case.eps
  wide = wide_dtype(slots_SxBxTxD)
  queries = queries_RxK.astype(wide)

  def absorb_slot(i, online):
    x_BxTxD = _slot(slots_SxBxTxD, i).astype(wide)
    logit_RxHxBxT, _ = _logits(queries, x_BxTxD, heads, eps)
    return _absorb(online, logit_RxHxBxT, x_BxTxD, _sees(visible_R, i))

  online = _nothing_read(queries_RxK, slots_SxBxTxD.shape[1:], heads, wide)
  online = lax.fori_loop(0, jnp.max(visible_R), absorb_slot, online)
  read = _finish(online)
  return read._replace(mix_RxBxTxD=read.mix_RxBxTxD.astype(slots_SxBxTxD.dtype))


def read_backward(
  queries_RxK: jax.Array,
  slots_SxBxTxD: jax.Array,
  visible_R: jax.Array,
  read: PartialRead,
  d_read: PartialRead,
  d_slots_SxBxTxD: jax.Array,
  case: ReadCase,
) -> tuple[jax.Array, jax.Array]:
  """As `readers.Reader.backward`."""
  wide = wide_dtype(slots_SxBxTxD)
  gradient = partial(
    _source_gradient,
    queries_RxK.astype(wide),
    jax.tree.map(lambda x: x.astype(wide), read),
    jax.tree.map(lambda x: x.astype(wide), d_read),
    case.heads,
    case.eps,
  )

  def slot_gradient(i, carry):
    d_queries, d_slots = carry
    new, dx_BxTxD = gradient(_slot(slots_SxBxTxD, i), _sees(visible_R, i))
    dx_BxTxD += _slot(d_slots, i).astype(wide)
    return d_queries + new, lax.dynamic_update_index_in_dim(
      d_slots, dx_BxTxD.astype(d_slots.dtype), i, 0
    )

  carry = (jnp.zeros(queries_RxK.shape, wide), d_slots_SxBxTxD)
  return lax.fori_loop(0, jnp.max(visible_R), slot_gradient, carry)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def merge(
  queries_RxK: jax.Array,
  prior: PartialRead | None,
  singles: Sequence[Single],
  heads: int,
  eps: float,
) -> jax.Array:
  """Completes reads with sources that are not in the memory.

  Args:
    queries_RxK: query times key norm weight, for each read.
    prior: of the slots of the memory; None without a memory.
    singles: all other sources; at least one source in all.
    heads: H.
    eps: of the key norm.

  Returns:
    mixed_RxBxTxD in float32 (float64 for float64 sources): the softmax-weighted
    sum of all sources; zero where none is visible.
  """
  return _merge_softmax(queries_RxK, prior, singles, heads, eps).mix_RxBxTxD


def _merge_softmax(queries_RxK, prior, singles, heads, eps) -> PartialRead:
  """The merged read, wide."""
  if prior is not None:
    wide, shape = wide_dtype(prior.mix_RxBxTxD), prior.mix_RxBxTxD.shape[1:]
  else:
    wide = wide_dtype(singles[0].x_BxTxD)
    shape = jnp.broadcast_shapes(*(x.shape for x, _ in singles))
  queries = queries_RxK.astype(wide)
  online = _nothing_read(queries_RxK, shape, heads, wide)
  if prior is not None:
    mix_RxBxTxD = prior.mix_RxBxTxD.astype(wide)
    online = _absorb(online, prior.lse_RxHxBxT, mix_RxBxTxD, True)
  for x_BxTxD, visible in singles:
    x_BxTxD = x_BxTxD.astype(wide)
    logit_RxHxBxT, _ = _logits(queries, x_BxTxD, heads, eps)
    online = _absorb(online, logit_RxHxBxT, x_BxTxD, visible)
  return _finish(online)


def _merge_forward(queries_RxK, prior, singles, heads, eps):
  merged = _merge_softmax(queries_RxK, prior, singles, heads, eps)
  return merged.mix_RxBxTxD, (queries_RxK, prior, singles)


def _merge_backward(heads, eps, residuals, d_mixed_RxBxTxD):
  queries_RxK, prior, singles = residuals
  wide = d_mixed_RxBxTxD.dtype
  queries = queries_RxK.astype(wide)
  merged = _merge_softmax(queries_RxK, prior, singles, heads, eps)
  d_prior = None
  if prior is not None:
    alpha_RxHxBxT = jnp.exp(prior.lse_RxHxBxT - merged.lse_RxHxBxT)
    off_mix = prior.mix_RxBxTxD.astype(wide) - merged.mix_RxBxTxD
    d_mix = _per_channel(alpha_RxHxBxT, off_mix.shape[-1]) * d_mixed_RxBxTxD
    d_prior = PartialRead(
      mix_RxBxTxD=d_mix.astype(prior.mix_RxBxTxD.dtype),
      lse_RxHxBxT=alpha_RxHxBxT * _dot(d_mixed_RxBxTxD, off_mix, heads),
    )
  d_queries = jnp.zeros(queries_RxK.shape, wide)
  d_singles = []
  d_merged = PartialRead(d_mixed_RxBxTxD, jnp.zeros((), wide))
  for x_BxTxD, visible in singles:
    new, dx_BxTxD = _source_gradient(
      queries, merged, d_merged, heads, eps, x_BxTxD, visible
    )
    d_queries += new
    shared = [i for i in (0, 1) if x_BxTxD.shape[i] < dx_BxTxD.shape[i]]
    dx_BxTxD = dx_BxTxD.sum(shared, keepdims=True)
    d_singles.append(Single(dx_BxTxD.astype(x_BxTxD.dtype), None))
  return (
    d_queries.astype(queries_RxK.dtype),
    d_prior,
    type(singles)(d_singles),
  )


merge.defvjp(_merge_forward, _merge_backward)


class _Online(NamedTuple):
  """The state of an online softmax."""

  max_RxHxBxT: jax.Array
  sum_RxHxBxT: jax.Array
  mix_RxBxTxD: jax.Array


def _nothing_read(queries_RxK, shape, heads, wide) -> _Online:
  reads = len(queries_RxK)
  stats = jnp.zeros((reads, heads, *shape[:2]), wide)
  return _Online(stats + MASKED, stats, jnp.zeros((reads, *shape), wide))


def _absorb(online, logit_RxHxBxT, value_RxBxTxD, visible) -> _Online:
  """Takes one more source into the softmax."""
  logit_RxHxBxT = jnp.where(visible, logit_RxHxBxT, MASKED)
  above_RxHxBxT = logit_RxHxBxT - online.max_RxHxBxT
  # The larger of the two is scaled by exactly 1, however this is compiled.
  rescale = jnp.exp(jnp.minimum(-above_RxHxBxT, 0))
  weight = jnp.where(visible, jnp.exp(jnp.minimum(above_RxHxBxT, 0)), 0)
  width = value_RxBxTxD.shape[-1]
  return _Online(
    max_RxHxBxT=jnp.maximum(online.max_RxHxBxT, logit_RxHxBxT),
    sum_RxHxBxT=rescale * online.sum_RxHxBxT + weight,
    mix_RxBxTxD=_per_channel(rescale, width) * online.mix_RxBxTxD
    + _per_channel(weight, width) * value_RxBxTxD,
  )


def _finish(online: _Online) -> PartialRead:
  total = jnp.where(online.sum_RxHxBxT > 0, online.sum_RxHxBxT, 1)
  scale = _per_channel(1 / total, online.mix_RxBxTxD.shape[-1])
  return PartialRead(
    mix_RxBxTxD=scale * online.mix_RxBxTxD,
    lse_RxHxBxT=online.max_RxHxBxT + jnp.log(total),
  )


def _source_gradient(
  queries_RxK, read, d_read, heads, eps, x_BxTxD, visible
) -> tuple[jax.Array, jax.Array]:
  """What one source of a read gives: gradients of the queries and of itself."""
  wide = queries_RxK.dtype
  width, key_size = x_BxTxD.shape[-1], queries_RxK.shape[-1]
  x_BxTxD = jnp.broadcast_to(x_BxTxD, read.mix_RxBxTxD.shape[1:]).astype(wide)
  key_BxTxK = _keys(x_BxTxD, key_size)
  logit_RxHxBxT, rstd_BxT = _logits(queries_RxK, x_BxTxD, heads, eps)
  logit_RxHxBxT = jnp.where(visible, logit_RxHxBxT, MASKED)
  alpha_RxHxBxT = jnp.where(
    visible, jnp.exp(logit_RxHxBxT - read.lse_RxHxBxT), 0
  )
  off_mix_RxHxBxT = _dot(d_read.mix_RxBxTxD, x_BxTxD - read.mix_RxBxTxD, heads)
  d_logit_RxHxBxT = alpha_RxHxBxT * (off_mix_RxHxBxT + d_read.lse_RxHxBxT)
  d_dot_RxHxBxT = d_logit_RxHxBxT * rstd_BxT
  d_queries_RxHxK = jnp.einsum(
    "rhbt,bthk->rhk",
    d_dot_RxHxBxT,
    by_head(key_BxTxK, heads),
    precision=lax.Precision.HIGHEST,
  )
  shrink_BxT = jnp.square(rstd_BxT) / key_size
  shrink_BxT *= jnp.sum(d_logit_RxHxBxT * logit_RxHxBxT, axis=(0, 1))
  d_key_BxTxK = -key_BxTxK * shrink_BxT[..., None]
  d_x_BxTxD: Any = 0
  for r in range(len(queries_RxK)):
    d_key_BxTxK += _per_channel(d_dot_RxHxBxT[r], key_size) * queries_RxK[r]
    d_x_BxTxD += _per_channel(alpha_RxHxBxT[r], width) * d_read.mix_RxBxTxD[r]
  d_x_BxTxD = d_x_BxTxD.at[..., width - key_size :].add(d_key_BxTxK)
  return d_queries_RxHxK.reshape(queries_RxK.shape), d_x_BxTxD


def _logits(queries_RxK, x_BxTxD, heads, eps) -> tuple[jax.Array, jax.Array]:
  """Returns logit_RxHxBxT and rstd_BxT of a source."""
  key_BxTxK = _keys(x_BxTxD, queries_RxK.shape[-1])
  rstd_BxT = lax.rsqrt(jnp.mean(jnp.square(key_BxTxK), -1) + eps)
  dot_RxHxBxT = jnp.einsum(
    "rhk,bthk->rhbt",
    by_head(queries_RxK, heads),
    by_head(key_BxTxK, heads),
    precision=lax.Precision.HIGHEST,
  )
  return dot_RxHxBxT * rstd_BxT, rstd_BxT


def _dot(a_RxBxTxD, b_RxBxTxD, heads) -> jax.Array:
  """Products over the channels of each head: RxHxBxT."""
  # einsum, not a sum of products: much faster than a row reduction on CPU.
  return jnp.einsum(
    "rbthc,rbthc->rhbt",
    by_head(a_RxBxTxD, heads),
    by_head(b_RxBxTxD, heads),
    precision=lax.Precision.HIGHEST,
  )


def wide_dtype(x: jax.Array) -> Any:
  """The dtype of statistics over x: float32, or float64 for float64."""
  return jnp.promote_types(x.dtype, jnp.float32)


def by_head(x, heads):
  """Splits the last axis into [H, size / H]."""
  return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _slot(stacked, i):
  return lax.dynamic_index_in_dim(stacked, i, 0, keepdims=False)


def _sees(visible_R, i):
  return (i < visible_R)[:, None, None, None]


def _keys(x_BxTxD, key_size):
  return x_BxTxD[..., x_BxTxD.shape[-1] - key_size :]


def _per_channel(stat, size):
  """Spreads [..., H, B, T] over [..., B, T, size], a head over its group."""
  stat = jnp.moveaxis(stat, -3, -1)
  heads = stat.shape[-1]
  if heads == 1:
    return stat  # broadcasts
  spread = jnp.broadcast_to(stat[..., None], (*stat.shape, size // heads))
  return spread.reshape(*stat.shape[:-1], size)
