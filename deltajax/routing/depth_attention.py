"""Depth attention: each token attends over depth to its own earlier vectors.

    logit_i = <q, key(x_i)> * rsqrt(mean(key(x_i)^2) + eps)
    alpha   = softmax over the visible sources
    out     = stream + sum_i alpha_i * x_i

The sources of a read are, in this order, the null source, the visible slots of
the memory, and the running source. Statistics are float32 (float64 for float64
inputs).

Shapes: B batch, T sequence, D width, S slots, R reads, H heads, K key size,
C = D / H, N all sources of a read (null, slots, running).
"""

from collections.abc import Callable, Mapping
from functools import partial
import types
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.memory import Sources
from deltajax.routing.readers import read_slots, Reader
from deltajax.routing.streaming import (
  by_head,
  MASKED,
  merge,
  PartialRead,
  read_backward,
  read_forward,
  Single,
  wide_dtype,
)
from deltajax.routing.validation import check_name, ConfigError


def depth_attention(
  queries_RxK: jax.Array,
  memory_SxBxTxD: jax.Array,
  *,
  visible: jax.Array | int,
  running_BxTxD: jax.Array | None = None,
  running_visible: jax.Array | bool = True,
  stream_BxTxD: jax.Array | None = None,
  null_D: jax.Array | None = None,
  heads: int = 1,
  key_dim: int | None = None,
  eps: float,
  implementation: str | None = None,
) -> jax.Array:
  """Reads the depth memory with R queries in one pass.

  Args:
    queries_RxK: query times key norm weight, for each read (logits need
      nothing else of the key norm). K is `key_dim`, or D where that is None.
    memory_SxBxTxD: stacked sources; their values enter the mix as they are.
    visible: the first `visible` slots are read, at most S; a number, or one
      for each read. May be traced.
    running_BxTxD: one more source, the open part of the current block.
    running_visible: whether that source is read. May be traced.
    stream_BxTxD: added to every mix (additive variants).
    null_D: one more source, the same vector for every token.
    heads: H; queries and values are split into H groups with a softmax each,
      the key norm is over the full key.
    key_dim: keys are the last `key_dim` channels, normed over those.
    eps: of the key norm.
    implementation: `xla` (online softmax over the visible sources, with a
      hand-written gradient), `reference` (the definition in plain jnp), or
      None for the best on this platform.

  Returns:
    mixed_RxBxTxD, in the dtype of the memory. A read with no visible source
    returns the stream (zero where there is none).

  Raises:
    ConfigError: if shapes disagree or the implementation is unknown.

  References:
    AttnRes, arXiv 2603.15031. Delta Attention Residuals, arXiv 2605.18855.
  """
  if isinstance(visible, int | np.integer) and not 0 <= visible <= len(
    memory_SxBxTxD
  ):
    raise ConfigError(
      f"visible is {visible}; the memory has {len(memory_SxBxTxD)} slots."
    )
  name = "xla" if implementation is None else implementation
  check_name("depth attention implementation", name, IMPLEMENTATIONS)
  sources = Sources(
    null_D=null_D,
    memory_SxBxTxD=memory_SxBxTxD,
    visible=jnp.minimum(jnp.asarray(visible, jnp.int32), len(memory_SxBxTxD)),
    running_BxTxD=running_BxTxD,
    running_visible=jnp.asarray(running_visible, bool),
  )
  _check_shapes(queries_RxK, sources, stream_BxTxD, heads, key_dim)
  mixed_RxBxTxD = IMPLEMENTATIONS[name](queries_RxK, sources, heads, eps)
  return add_stream(mixed_RxBxTxD, stream_BxTxD, memory_SxBxTxD.dtype)


def add_stream(
  mixed_RxBxTxD: jax.Array, stream_BxTxD: jax.Array | None, dtype: Any
) -> jax.Array:
  """Adds the stream, if any, to wide reads; returns them in `dtype`."""
  if stream_BxTxD is not None:
    mixed_RxBxTxD += stream_BxTxD.astype(mixed_RxBxTxD.dtype)
  return mixed_RxBxTxD.astype(dtype)


def depth_attention_weights(
  queries_RxK: jax.Array, sources: Sources, heads: int, eps: float
) -> jax.Array:
  """Returns the routing weights alpha_RxHxNxBxT; invisible sources have 0.

  Args:
    queries_RxK: as for `depth_attention`.
    sources: what the reads may attend to.
    heads: H.
    eps: of the key norm.
  """
  alphas = [alpha for alpha, _ in _weighted(queries_RxK, sources, heads, eps)]
  return jnp.concatenate(alphas, axis=2)


def _definition(
  queries_RxK: jax.Array, sources: Sources, heads: int, eps: float
) -> jax.Array:
  """What every other implementation is tested against."""
  memory = sources.memory_SxBxTxD
  wide = wide_dtype(memory)
  mixed_RxBxTxD = jnp.zeros((len(queries_RxK), *memory.shape[1:]), wide)
  for alpha_RxHxNxBxT, x_NxBxTxD in _weighted(queries_RxK, sources, heads, eps):
    mixed_RxBxTxD += jnp.einsum(
      "rhnbt,nbthc->rbthc",
      alpha_RxHxNxBxT,
      by_head(x_NxBxTxD.astype(wide), heads),
      precision=lax.Precision.HIGHEST,
    ).reshape(mixed_RxBxTxD.shape)
  return mixed_RxBxTxD


def _two_stages(
  reader: Reader,
  queries_RxK: jax.Array,
  sources: Sources,
  heads: int,
  eps: float,
) -> jax.Array:
  """One pass over the memory, then the sources that are not in it."""
  visible_R = jnp.broadcast_to(sources.visible, len(queries_RxK))
  read, _ = read_slots(
    reader, queries_RxK, sources.memory_SxBxTxD, visible_R, heads, eps
  )
  singles = []
  if sources.null_D is not None:
    singles.append(null_source(sources.null_D, sources.memory_SxBxTxD.dtype))
  if sources.running_BxTxD is not None:
    singles.append(Single(sources.running_BxTxD, sources.running_visible))
  return merge(queries_RxK, read, tuple(singles), heads, eps)


def null_source(null_D: jax.Array, dtype: Any) -> Single:
  """The null source, which every token sees."""
  return Single(null_D.astype(dtype)[None, None], True)


def _plain_forward(queries_RxK, slots_SxBxTxD, visible_R, heads, eps):
  """A pass over the memory in plain jnp, as `readers.Reader.forward`."""
  logits_RxHxSxBxT = _logits(queries_RxK, slots_SxBxTxD, heads, eps)
  seen_RxS = jnp.arange(len(slots_SxBxTxD)) < visible_R[:, None]
  seen_Rx1xSx1x1 = seen_RxS[:, None, :, None, None]
  masked = jnp.where(seen_Rx1xSx1x1, logits_RxHxSxBxT, MASKED)
  sources = Sources(None, slots_SxBxTxD, visible_R, None, False)
  mix_RxBxTxD = _definition(queries_RxK, sources, heads, eps)
  return PartialRead(
    mix_RxBxTxD=mix_RxBxTxD.astype(slots_SxBxTxD.dtype),
    lse_RxHxBxT=jnp.where(
      visible_R[:, None, None, None] > 0,
      jax.nn.logsumexp(masked, axis=2),
      MASKED,
    ),
  )


def _plain_backward(
  queries_RxK, slots_SxBxTxD, visible_R, read, d_read, d_slots, heads, eps
):
  """As `readers.Reader.backward`: what JAX makes of `_plain_forward`."""
  del read
  _, pull = jax.vjp(
    lambda queries, slots: _plain_forward(
      queries, slots, visible_R, heads, eps
    ),
    queries_RxK,
    slots_SxBxTxD,
  )
  d_queries_RxK, new = pull(d_read)
  return d_queries_RxK, d_slots + new


# How one pass over the memory may be done.
READERS: Mapping[str, Reader] = types.MappingProxyType(
  {
    "xla": Reader(read_forward, read_backward),
    "reference": Reader(_plain_forward, _plain_backward),
  }
)
IMPLEMENTATIONS: Mapping[str, Callable[..., jax.Array]] = (
  types.MappingProxyType(
    {name: partial(_two_stages, reader) for name, reader in READERS.items()}
    | {"reference": _definition}
  )
)


def _weighted(
  queries_RxK: jax.Array, sources: Sources, heads: int, eps: float
) -> list[tuple[jax.Array, jax.Array]]:
  """Pairs of (alpha_RxHxNxBxT, x_NxBxTxD), one for each kind of source.

  The kinds stay apart so that the memory is not copied into a longer stack.
  """
  memory = sources.memory_SxBxTxD
  visible_Rx1 = jnp.broadcast_to(sources.visible, len(queries_RxK))[:, None]
  kinds: list[tuple[jax.Array, Any]] = [
    (memory, jnp.arange(len(memory)) < visible_Rx1)
  ]
  if sources.null_D is not None:
    null = jnp.broadcast_to(sources.null_D, (1, *memory.shape[1:]))
    kinds.insert(0, (null.astype(memory.dtype), True))
  if sources.running_BxTxD is not None:
    kinds.append((sources.running_BxTxD[None], sources.running_visible))
  mask_RxN = jnp.concatenate(
    [jnp.broadcast_to(mask, (len(queries_RxK), len(x))) for x, mask in kinds],
    axis=1,
  )
  logits_RxHxNxBxT = jnp.concatenate(
    [_logits(queries_RxK, x, heads, eps) for x, _ in kinds], axis=2
  )
  alpha_RxHxNxBxT = _masked_softmax(
    logits_RxHxNxBxT, mask_RxN[:, None, :, None, None]
  )
  ends = np.cumsum([len(x) for x, _ in kinds])[:-1]
  alphas = jnp.split(alpha_RxHxNxBxT, ends, axis=2)
  return [(alpha, x) for alpha, (x, _) in zip(alphas, kinds, strict=True)]


def _logits(
  queries_RxK: jax.Array, x_NxBxTxD: jax.Array, heads: int, eps: float
) -> jax.Array:
  """Returns logits_RxHxNxBxT."""
  key_size = queries_RxK.shape[1]
  wide = wide_dtype(x_NxBxTxD)
  keys_NxBxTxK = x_NxBxTxD[..., -key_size:].astype(wide)
  rstd_NxBxT = lax.rsqrt(jnp.mean(jnp.square(keys_NxBxTxK), -1) + eps)
  dots_RxHxNxBxT = jnp.einsum(
    "rhk,nbthk->rhnbt",
    by_head(queries_RxK.astype(wide), heads),
    by_head(keys_NxBxTxK, heads),
    precision=lax.Precision.HIGHEST,
  )
  return dots_RxHxNxBxT * rstd_NxBxT


def _masked_softmax(
  logits_RxHxNxBxT: jax.Array, mask_Rx1xNx1x1: jax.Array
) -> jax.Array:
  """Softmax over N with finite masks: all zero where nothing is visible."""
  masked = jnp.where(mask_Rx1xNx1x1, logits_RxHxNxBxT, MASKED)
  largest = jnp.max(masked, axis=2, keepdims=True, initial=MASKED)
  weights = jnp.exp(masked - lax.stop_gradient(largest))
  weights = jnp.where(mask_Rx1xNx1x1, weights, 0)
  total = jnp.sum(weights, axis=2, keepdims=True)
  return weights / jnp.where(total > 0, total, 1)


def _check_shapes(
  queries_RxK: jax.Array,
  sources: Sources,
  stream_BxTxD: jax.Array | None,
  heads: int,
  key_dim: int | None,
) -> None:
  memory = sources.memory_SxBxTxD
  if memory.ndim != 4 or queries_RxK.ndim != 2:
    raise ConfigError(
      "depth_attention takes queries [R, K] and a memory [S, B, T, D]; the"
      f" shapes are {queries_RxK.shape} and {memory.shape}."
    )
  width = memory.shape[-1]
  key_size = width if key_dim is None else key_dim
  if queries_RxK.shape[1] != key_size or key_size > width:
    raise ConfigError(
      f"queries of size {queries_RxK.shape[1]} do not fit keys of size"
      f" {key_size} (key_dim={key_dim}, width {width})."
    )
  if width % heads or key_size % heads:
    raise ConfigError(
      f"width {width} and key size {key_size} must be divisible by heads"
      f" {heads}."
    )
  expected = {
    "running": (sources.running_BxTxD, memory.shape[1:]),
    "stream": (stream_BxTxD, memory.shape[1:]),
    "null": (sources.null_D, (width,)),
  }
  for name, (array, shape) in expected.items():
    if array is not None and array.shape != shape:
      raise ConfigError(
        f"{name} has shape {array.shape}; a memory of shape {memory.shape}"
        f" needs {shape}."
      )
