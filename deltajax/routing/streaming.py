"""Depth attention in XLA as a loop over the visible sources.

One source at a time with an online softmax, so that invisible slots are never
touched and no float32 copy of the sources exists. The gradient is written out
(with the mix o, for every read):

    dlogit_i = alpha_i <do, x_i - o>
    dx_i     = alpha_i do + dlogit_i rstd_i (q - x_i rstd_i^2 <q, x_i> / K)
    dq       = sum over tokens and sources of dlogit_i rstd_i x_i

A lone source is its own mix, so that its query gets a gradient of exactly 0;
<do, x_i> - <do, o>, summed apart, would leave rounding.

Saved for it: per token and source the logit and rstd, per token max and sum.

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size,
C = D / H.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from deltajax.routing.memory import Sources

MASKED = -1e30  # finite: no NaN where nothing is visible


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def streaming_attention(
  queries_RxK: jax.Array,
  sources: Sources,
  stream_BxTxD: jax.Array | None,
  heads: int,
  eps: float,
) -> jax.Array:
  """Same contract as `depth_attention`, which see; returns mixed_RxBxTxD."""
  return _forward(queries_RxK, sources, stream_BxTxD, heads, eps)[0]


class _Scores(NamedTuple):
  """What a read keeps of one source."""

  logit_RxBxTxH: jax.Array
  rstd_BxT: jax.Array


class _Online(NamedTuple):
  """The state of an online softmax."""

  max_RxBxTxH: jax.Array
  sum_RxBxTxH: jax.Array
  mix_RxBxTxD: jax.Array


class _Gradients(NamedTuple):
  """What the backward pass of one source gives."""

  queries_RxK: jax.Array
  source_BxTxD: jax.Array


def _forward(queries_RxK, sources, stream_BxTxD, heads, eps):
  memory = sources.memory_SxBxTxD
  num_slots, batch, length, width = memory.shape
  wide = jnp.promote_types(memory.dtype, jnp.float32)
  queries = queries_RxK.astype(wide)
  shape = (len(queries), batch, length, heads)
  online = _Online(
    max_RxBxTxH=jnp.full(shape, MASKED, wide),
    sum_RxBxTxH=jnp.zeros(shape, wide),
    mix_RxBxTxD=jnp.zeros((len(queries), batch, length, width), wide),
  )
  absorb = partial(_absorb, queries, heads=heads, eps=eps)

  null_scores = None
  if sources.null_D is not None:
    online, null_scores = absorb(online, _null_source(sources), True)

  def absorb_slot(i, carry):
    online, scores = carry
    online, new = absorb(online, _slot(memory, i), True)
    return online, jax.tree.map(
      lambda old, x: lax.dynamic_update_index_in_dim(old, x, i, 0), scores, new
    )

  scores = _Scores(
    logit_RxBxTxH=jnp.zeros((num_slots, *shape), wide),
    rstd_BxT=jnp.zeros((num_slots, batch, length), wide),
  )
  if num_slots:
    online, scores = lax.fori_loop(
      0, sources.visible, absorb_slot, (online, scores)
    )
  running_scores = None
  if sources.running_BxTxD is not None:
    online, running_scores = absorb(
      online, sources.running_BxTxD, sources.running_visible
    )

  total = jnp.where(online.sum_RxBxTxH > 0, online.sum_RxBxTxH, 1)
  mixed = _per_head(1 / total, width) * online.mix_RxBxTxD
  online = online._replace(sum_RxBxTxH=total, mix_RxBxTxD=mixed)
  out = mixed if stream_BxTxD is None else mixed + stream_BxTxD.astype(wide)
  saved = (online, null_scores, scores, running_scores)
  return out.astype(memory.dtype), (queries_RxK, sources, stream_BxTxD, saved)


def _backward(heads, eps, residuals, d_out_RxBxTxD):
  del eps
  queries_RxK, sources, stream_BxTxD, saved = residuals
  online, null_scores, scores, running_scores = saved
  memory = sources.memory_SxBxTxD
  wide = online.mix_RxBxTxD.dtype
  d_out = d_out_RxBxTxD.astype(wide)
  source_gradient = partial(
    _source_gradient, queries_RxK.astype(wide), online, d_out, heads
  )

  d_queries = jnp.zeros(queries_RxK.shape, wide)
  d_null = d_running = d_stream = None
  if sources.null_D is not None:
    found = source_gradient(_null_source(sources), null_scores, True)
    d_queries += found.queries_RxK
    d_null = found.source_BxTxD.sum((0, 1)).astype(sources.null_D.dtype)

  def slot_gradient(i, carry):
    d_queries, d_memory = carry
    at_i = jax.tree.map(lambda x: _slot(x, i), scores)
    found = source_gradient(_slot(memory, i), at_i, True)
    return d_queries + found.queries_RxK, lax.dynamic_update_index_in_dim(
      d_memory, found.source_BxTxD.astype(memory.dtype), i, 0
    )

  d_memory = jnp.zeros_like(memory)
  if memory.shape[0]:
    d_queries, d_memory = lax.fori_loop(
      0, sources.visible, slot_gradient, (d_queries, d_memory)
    )
  if sources.running_BxTxD is not None:
    found = source_gradient(
      sources.running_BxTxD, running_scores, sources.running_visible
    )
    d_queries += found.queries_RxK
    d_running = found.source_BxTxD.astype(sources.running_BxTxD.dtype)
  if stream_BxTxD is not None:
    d_stream = d_out.sum(0).astype(stream_BxTxD.dtype)
  d_sources = Sources(
    null_D=d_null,
    memory_SxBxTxD=d_memory,
    visible=None,
    running_BxTxD=d_running,
    running_visible=None,
  )
  return d_queries.astype(queries_RxK.dtype), d_sources, d_stream


streaming_attention.defvjp(_forward, _backward)


def _absorb(queries_RxK, online, x_BxTxD, visible, *, heads, eps):
  """Takes one source into the online softmax; returns its scores too."""
  wide = queries_RxK.dtype
  x_BxTxD = x_BxTxD.astype(wide)
  key_BxTxK = _keys(x_BxTxD, queries_RxK)
  rstd_BxT = lax.rsqrt(jnp.mean(jnp.square(key_BxTxK), -1) + eps)
  dot_RxBxTxH = jnp.einsum(
    "rhk,bthk->rbth",
    by_head(queries_RxK, heads),
    by_head(key_BxTxK, heads),
    precision=lax.Precision.HIGHEST,
  )
  logit_RxBxTxH = dot_RxBxTxH * rstd_BxT[..., None]
  max_RxBxTxH = jnp.where(
    visible, jnp.maximum(online.max_RxBxTxH, logit_RxBxTxH), online.max_RxBxTxH
  )
  rescale = jnp.exp(online.max_RxBxTxH - max_RxBxTxH)
  weight = jnp.where(visible, jnp.exp(logit_RxBxTxH - max_RxBxTxH), 0)
  width = x_BxTxD.shape[-1]
  online = _Online(
    max_RxBxTxH=max_RxBxTxH,
    sum_RxBxTxH=online.sum_RxBxTxH * rescale + weight,
    mix_RxBxTxD=online.mix_RxBxTxD * _per_head(rescale, width)
    + _per_head(weight, width) * x_BxTxD,
  )
  return online, _Scores(logit_RxBxTxH, rstd_BxT)


def _source_gradient(
  queries_RxK, online, d_out_RxBxTxD, heads, x_BxTxD, scores, visible
):
  """Gradients of the queries and of one source, from what was saved."""
  wide = queries_RxK.dtype
  width, key_size = x_BxTxD.shape[-1], queries_RxK.shape[-1]
  x_BxTxD = x_BxTxD.astype(wide)
  key_BxTxK = _keys(x_BxTxD, queries_RxK)
  # einsum, not a sum of products: much faster than a row reduction on CPU.
  off_mix_RxBxTxH = jnp.einsum(
    "rbthc,rbthc->rbth",
    by_head(d_out_RxBxTxD, heads),
    by_head(x_BxTxD - online.mix_RxBxTxD, heads),
    precision=lax.Precision.HIGHEST,
  )
  weight = jnp.exp(scores.logit_RxBxTxH - online.max_RxBxTxH)
  alpha = jnp.where(visible, weight, 0) / online.sum_RxBxTxH
  d_logit_RxBxTxH = alpha * off_mix_RxBxTxH
  d_dot_RxBxTxH = d_logit_RxBxTxH * scores.rstd_BxT[..., None]
  d_queries_RxHxK = jnp.einsum(
    "rbth,bthk->rhk",
    d_dot_RxBxTxH,
    by_head(key_BxTxK, heads),
    precision=lax.Precision.HIGHEST,
  )
  shrink_BxT = jnp.square(scores.rstd_BxT) / key_size
  shrink_BxT *= jnp.sum(d_logit_RxBxTxH * scores.logit_RxBxTxH, axis=(0, 3))
  d_key_BxTxK = -key_BxTxK * shrink_BxT[..., None]
  d_x_BxTxD = jnp.zeros_like(x_BxTxD)
  for r in range(len(queries_RxK)):
    d_key_BxTxK += _per_head(d_dot_RxBxTxH[r], key_size) * queries_RxK[r]
    d_x_BxTxD += _per_head(alpha[r], width) * d_out_RxBxTxD[r]
  d_x_BxTxD = d_x_BxTxD.at[..., width - key_size :].add(d_key_BxTxK)
  return _Gradients(d_queries_RxHxK.reshape(queries_RxK.shape), d_x_BxTxD)


def _slot(stacked, i):
  return lax.dynamic_index_in_dim(stacked, i, 0, keepdims=False)


def _null_source(sources: Sources) -> jax.Array:
  memory = sources.memory_SxBxTxD
  assert sources.null_D is not None
  return jnp.broadcast_to(sources.null_D.astype(memory.dtype), memory.shape[1:])


def _keys(x_BxTxD, queries_RxK):
  return x_BxTxD[..., x_BxTxD.shape[-1] - queries_RxK.shape[-1] :]


def by_head(x, heads):
  """Splits the last axis into [H, size / H]."""
  return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _per_head(scalar, size):
  """Spreads [..., H] over [..., size], each head's value over its group."""
  heads = scalar.shape[-1]
  if heads == 1:
    return scalar  # broadcasts
  spread = jnp.broadcast_to(scalar[..., None], (*scalar.shape, size // heads))
  return spread.reshape(*scalar.shape[:-1], size)
