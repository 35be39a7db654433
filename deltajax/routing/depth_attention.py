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
import types

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.memory import Sources
from deltajax.routing.streaming import by_head, MASKED, streaming_attention
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
    visible: the first `visible` slots are read, at most S. May be traced.
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
  return IMPLEMENTATIONS[name](queries_RxK, sources, stream_BxTxD, heads, eps)


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


def _reference(
  queries_RxK: jax.Array,
  sources: Sources,
  stream_BxTxD: jax.Array | None,
  heads: int,
  eps: float,
) -> jax.Array:
  """The definition that every other implementation is tested against."""
  memory = sources.memory_SxBxTxD
  wide = jnp.promote_types(memory.dtype, jnp.float32)
  mixed_RxBxTxD = jnp.zeros((len(queries_RxK), *memory.shape[1:]), wide)
  for alpha_RxHxNxBxT, x_NxBxTxD in _weighted(queries_RxK, sources, heads, eps):
    mixed_RxBxTxD += jnp.einsum(
      "rhnbt,nbthc->rbthc",
      alpha_RxHxNxBxT,
      by_head(x_NxBxTxD.astype(wide), heads),
      precision=lax.Precision.HIGHEST,
    ).reshape(mixed_RxBxTxD.shape)
  if stream_BxTxD is not None:
    mixed_RxBxTxD += stream_BxTxD.astype(wide)
  return mixed_RxBxTxD.astype(memory.dtype)


IMPLEMENTATIONS: Mapping[str, Callable[..., jax.Array]] = (
  types.MappingProxyType({"reference": _reference, "xla": streaming_attention})
)


def _weighted(
  queries_RxK: jax.Array, sources: Sources, heads: int, eps: float
) -> list[tuple[jax.Array, jax.Array]]:
  """Pairs of (alpha_RxHxNxBxT, x_NxBxTxD), one for each kind of source.

  The kinds stay apart so that the memory is not copied into a longer stack.
  """
  memory = sources.memory_SxBxTxD
  kinds = [(memory, jnp.arange(memory.shape[0]) < sources.visible)]
  if sources.null_D is not None:
    null = jnp.broadcast_to(sources.null_D, (1, *memory.shape[1:]))
    kinds.insert(0, (null.astype(memory.dtype), jnp.ones(1, bool)))
  if sources.running_BxTxD is not None:
    kinds.append((sources.running_BxTxD[None], sources.running_visible[None]))
  mask_N = jnp.concatenate([mask for _, mask in kinds])
  logits_RxHxNxBxT = jnp.concatenate(
    [_logits(queries_RxK, x, heads, eps) for x, _ in kinds], axis=2
  )
  alpha_RxHxNxBxT = _masked_softmax(logits_RxHxNxBxT, mask_N[:, None, None])
  ends = np.cumsum([len(x) for x, _ in kinds])[:-1]
  alphas = jnp.split(alpha_RxHxNxBxT, ends, axis=2)
  return [(alpha, x) for alpha, (x, _) in zip(alphas, kinds, strict=True)]


def _logits(
  queries_RxK: jax.Array, x_NxBxTxD: jax.Array, heads: int, eps: float
) -> jax.Array:
  """Returns logits_RxHxNxBxT."""
  key_size = queries_RxK.shape[1]
  wide = jnp.promote_types(x_NxBxTxD.dtype, jnp.float32)
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
  logits_RxHxNxBxT: jax.Array, mask_Nx1x1: jax.Array
) -> jax.Array:
  """Softmax over N with finite masks: all zero where nothing is visible."""
  masked = jnp.where(mask_Nx1x1, logits_RxHxNxBxT, MASKED)
  largest = jnp.max(masked, axis=2, keepdims=True, initial=MASKED)
  weights = jnp.exp(masked - lax.stop_gradient(largest))
  weights = jnp.where(mask_Nx1x1, weights, 0)
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
