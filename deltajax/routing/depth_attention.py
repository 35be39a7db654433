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

from deltajax.kernels import gpu, gpu_plan, tpu, tpu_plan
from deltajax.routing.choice import Choice, choose, gpu_refusal
from deltajax.routing.memory import Sources
from deltajax.routing.partial_read import (
  MASKED,
  PartialRead,
  ReadCase,
  Single,
)
from deltajax.routing.readers import case_of, read_slots, Reader
from deltajax.routing.streaming import (
  by_head,
  merge,
  read_backward,
  read_forward,
  wide_dtype,
)
from deltajax.routing.validation import ConfigError


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
      hand-written gradient), `pallas_tpu` and `pallas_triton` (the same as
      kernels for TPUs and NVIDIA GPUs), `interpret` and `interpret_triton`
      (these kernels anywhere, slow, for tests), `reference` (the definition
      in plain jnp), or None: see `choose_reader`.

  Returns:
    mixed_RxBxTxD, in the dtype of the memory. A read with no visible source
    returns the stream (zero where there is none).

  Raises:
    ConfigError: if shapes disagree, the implementation is unknown, or it does
      not support the case.

  References:
    AttnRes, arXiv 2603.15031. Delta Attention Residuals, arXiv 2605.18855.

  Examples:
    Two sources of one token, width 2. A query of zero weighs them the same:

    >>> import jax.numpy as jnp
    >>> memory_SxBxTxD = jnp.array([[1.0, 0.0], [0.0, 1.0]])[:, None, None]
    >>> queries_RxD = jnp.array([[0.0, 0.0], [100.0, 0.0]])
    >>> mixed_RxBxTxD = depth_attention(
    ...   queries_RxD, memory_SxBxTxD, visible=2, eps=1e-6
    ... )
    >>> mixed_RxBxTxD[:, 0, 0].tolist()
    [[0.5, 0.5], [1.0, 0.0]]
  """
  if isinstance(visible, int | np.integer) and not 0 <= visible <= len(
    memory_SxBxTxD
  ):
    raise ConfigError(
      f"visible is {visible}; the memory has {len(memory_SxBxTxD)} slots."
    )
  sources = Sources(
    null_D=null_D,
    memory_SxBxTxD=memory_SxBxTxD,
    visible=jnp.minimum(jnp.asarray(visible, jnp.int32), len(memory_SxBxTxD)),
    running_BxTxD=running_BxTxD,
    running_visible=jnp.asarray(running_visible, bool),
  )
  _check_shapes(queries_RxK, sources, stream_BxTxD, heads, key_dim)
  case = case_of(queries_RxK, memory_SxBxTxD, heads, eps)
  name = choose_reader(case, implementation).name
  if name == "reference":
    mixed_RxBxTxD = _definition(queries_RxK, sources, heads, eps)
  else:
    mixed_RxBxTxD = _two_stages(READERS[name], queries_RxK, sources, case)
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
  """The weights with which `depth_attention` mixes.

  Args:
    queries_RxK: as for `depth_attention`.
    sources: what the reads may attend to.
    heads: H.
    eps: of the key norm.

  Returns:
    alpha_RxHxNxBxT, float32 or wider; over N it sums to 1, or to 0 where
    nothing is visible. Invisible sources have 0.

  References:
    AttnRes, arXiv 2603.15031.

  Examples:
    >>> import jax.numpy as jnp
    >>> sources = Sources(
    ...   null_D=None,
    ...   memory_SxBxTxD=jnp.ones((3, 1, 1, 4)),
    ...   visible=2,
    ...   running_BxTxD=None,
    ...   running_visible=False,
    ... )
    >>> alpha = depth_attention_weights(jnp.zeros((1, 4)), sources, 1, 1e-6)
    >>> alpha[0, 0, :, 0, 0].tolist()
    [0.5, 0.5, 0.0]
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
  reader: Reader, queries_RxK: jax.Array, sources: Sources, case: ReadCase
) -> jax.Array:
  """One pass over the memory, then the sources that are not in it."""
  visible_R = jnp.broadcast_to(sources.visible, len(queries_RxK))
  read, _ = read_slots(
    reader, queries_RxK, sources.memory_SxBxTxD, visible_R, case
  )
  singles = []
  if sources.null_D is not None:
    singles.append(null_source(sources.null_D, sources.memory_SxBxTxD.dtype))
  if sources.running_BxTxD is not None:
    singles.append(Single(sources.running_BxTxD, sources.running_visible))
  return merge(queries_RxK, read, tuple(singles), case.heads, case.eps)


def null_source(null_D: jax.Array, dtype: Any) -> Single:
  """The null source, which every token sees."""
  return Single(null_D.astype(dtype)[None, None], True)


def choose_reader(
  case: ReadCase, implementation: str | None = None, platform: str | None = None
) -> Choice:
  """Returns the implementation that serves a pass over the memory.

  Args:
    case: what is computed.
    implementation: a name of `READERS`, or None for the first that supports
      the case of `pallas_tpu` (tpu), `pallas_triton` (gpu), `xla`.
    platform: as for `choice.choose`.

  Raises:
    ConfigError: if the implementation is unknown or cannot serve.
  """
  return choose(
    "depth attention",
    case,
    READERS,
    ("pallas_tpu", "pallas_triton", "xla"),
    implementation,
    platform,
  )


def _plain_forward(queries_RxK, slots_SxBxTxD, visible_R, case):
  """A pass over the memory in plain jnp, as `readers.Reader.forward`."""
  logits_RxHxSxBxT = _logits(queries_RxK, slots_SxBxTxD, case.heads, case.eps)
  seen_RxS = jnp.arange(len(slots_SxBxTxD)) < visible_R[:, None]
  seen_Rx1xSx1x1 = seen_RxS[:, None, :, None, None]
  masked = jnp.where(seen_Rx1xSx1x1, logits_RxHxSxBxT, MASKED)
  sources = Sources(None, slots_SxBxTxD, visible_R, None, False)
  mix_RxBxTxD = _definition(queries_RxK, sources, case.heads, case.eps)
  return PartialRead(
    mix_RxBxTxD=mix_RxBxTxD.astype(slots_SxBxTxD.dtype),
    lse_RxHxBxT=jnp.where(
      visible_R[:, None, None, None] > 0,
      jax.nn.logsumexp(masked, axis=2),
      MASKED,
    ),
  )


def _plain_backward(
  queries_RxK, slots_SxBxTxD, visible_R, read, d_read, d_slots, case
):
  """As `readers.Reader.backward`: what JAX makes of `_plain_forward`."""
  del read
  _, pull = jax.vjp(
    lambda queries, slots: _plain_forward(queries, slots, visible_R, case),
    queries_RxK,
    slots_SxBxTxD,
  )
  d_queries_RxK, new = pull(d_read)
  return d_queries_RxK, d_slots + new


def _kernel_reader(
  kernels: types.ModuleType,
  refusal: Callable[[ReadCase], str | None],
  platform: str | None,
  options: Callable[[ReadCase], Mapping[str, Any]] = lambda case: {},
) -> Reader:
  """The reader that a module of `deltajax.kernels` makes.

  Args:
    kernels: the module.
    refusal: as in `Reader`.
    platform: as in `Reader`.
    options: what its functions want to know besides.
  """

  def forward(queries_RxK, slots_SxBxTxD, visible_R, case):
    mix_RxBxTxD, lse_RxHxBxT = kernels.read_forward(
      queries_RxK,
      slots_SxBxTxD,
      visible_R,
      case.heads,
      case.eps,
      **options(case),
    )
    return PartialRead(mix_RxBxTxD, lse_RxHxBxT)

  def backward(
    queries_RxK, slots_SxBxTxD, visible_R, read, d_read, d_slots, case
  ):
    return kernels.read_backward(
      queries_RxK,
      slots_SxBxTxD,
      visible_R,
      read.mix_RxBxTxD,
      read.lse_RxHxBxT,
      d_read.mix_RxBxTxD,
      d_read.lse_RxHxBxT,
      d_slots,
      case.heads,
      case.eps,
      **options(case),
    )

  return Reader(forward, backward, refusal, platform)


def _dtype_refusal(case: ReadCase) -> str | None:
  if case.dtype not in ("bfloat16", "float32"):
    return f"sources are bfloat16 or float32, the dtype is {case.dtype}"
  return None


def _tile_refusal(choose_tile: Callable[..., Any]) -> str | None:
  """Why no tile fits a pass or its gradient, or None."""
  try:
    for backward in (False, True):
      choose_tile(backward=backward)
  except ValueError as error:
    return str(error)
  return None


def _tpu_refusal(case: ReadCase, device_kind: str | None = None) -> str | None:
  """Why not on a TPU of this kind; None for that of the case."""
  return _dtype_refusal(case) or _tile_refusal(
    partial(
      tpu_plan.choose_tile,
      case.length,
      case.width,
      case.reads,
      case.heads,
      case.dtype,
      device_kind=device_kind or case.device_kind,
    )
  )


def _interpret_triton_refusal(case: ReadCase) -> str | None:
  return (
    gpu.unavailable()
    or _dtype_refusal(case)
    or _tile_refusal(
      partial(
        gpu_plan.choose_tile, case.length, case.width, case.reads, case.heads
      )
    )
  )


def _triton_refusal(case: ReadCase) -> str | None:
  return gpu_refusal(case.compute_capability) or _interpret_triton_refusal(case)


# What the interpreter takes itself for.
INTERPRETED_TPU = "TPU v5 lite"

# How one pass over the memory may be done.
READERS: Mapping[str, Reader] = types.MappingProxyType(
  {
    "pallas_tpu": _kernel_reader(
      tpu,
      _tpu_refusal,
      "tpu",
      lambda case: {"device_kind": case.device_kind},
    ),
    "pallas_triton": _kernel_reader(gpu, _triton_refusal, "gpu"),
    "xla": Reader(read_forward, read_backward),
    "interpret": _kernel_reader(
      tpu,
      partial(_tpu_refusal, device_kind=INTERPRETED_TPU),
      None,
      lambda _: {"device_kind": INTERPRETED_TPU, "interpret": True},
    ),
    "interpret_triton": _kernel_reader(
      gpu, _interpret_triton_refusal, None, lambda _: {"interpret": True}
    ),
    "reference": Reader(_plain_forward, _plain_backward),
  }
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
