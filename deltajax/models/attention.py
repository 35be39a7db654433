"""Causal attention within documents: one function, several implementations.

`xla` is the definition. The others compute the same with kernels that never
write a [T, T] matrix of logits, where the case allows. An implementation says
why it does not support a case; one that is named explicitly serves or raises.

Under a mesh, `xla` and `cudnn` are partitioned by the compiler. Mosaic kernels
are not: `splash` runs inside of `shard_map`, each device with its rows and
heads, and needs T whole.

Shapes: B batch, T queries, S keys (S = T), H query heads, K key/value heads,
G = H / K query heads per key head, C head channels.
"""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.choice import (
  Choice,
  choose,
  compute_capability,
  gpu_refusal,
  has_cuda_plugin,
)
from deltajax.routing.sharding import active_sharding, traced_device
from deltajax.routing.validation import ConfigError

LANES = 128  # Splash tiles are multiples of it.
MAX_SPLASH_HEAD_DIM = 256  # Wider heads are not tested and fill the VMEM.


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """What an implementation may or may not support.

  Attributes:
    length: T.
    head_dim: C.
    dtype: of queries, keys and values.
    segment_dtype: of segment ids; None where there are none.
    context: over how many devices the sequence is split.
    compute_capability: of a GPU, for example `8.0`; None where not known.
  """

  length: int
  head_dim: int
  dtype: str
  segment_dtype: str | None = None
  context: int = 1
  compute_capability: str | None = None

  @classmethod
  def traced(
    cls, length: int, head_dim: int, dtype: str, segment_dtype: str | None
  ) -> "AttentionCase":
    """The case of a call, on the devices that it is traced for."""
    sharding = active_sharding()
    return cls(
      length,
      head_dim,
      dtype,
      segment_dtype,
      1 if sharding is None else sharding.num_shards("sequence"),
      compute_capability(traced_device()),
    )


def dot_product_attention(
  query_BxTxHxC: jax.Array,
  key_BxSxKxC: jax.Array,
  value_BxSxKxC: jax.Array,
  segment_ids_BxT: jax.Array | None = None,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """Causal grouped-query attention within documents.

  Logits are scaled by C**-0.5; the softmax is in float32 (or float64).

  Args:
    query_BxTxHxC: H query heads.
    key_BxSxKxC: K key heads; K divides H; S = T.
    value_BxSxKxC: values.
    segment_ids_BxT: integers; tokens attend only within equal ids. None: one
      document a row.
    implementation: `xla` (plain einsums, any platform and dtype), `splash`
      (TPU), `cudnn` (NVIDIA GPU, bfloat16 and float16), `splash_interpret`
      (splash without a TPU, slow, for tests), or None: see `choose_attention`.
      With `cudnn`, segment ids cost a bias [B, 1, T, T] and its gradient.

  Returns:
    mixed_BxTxHxC, in the dtype of the query.

  Raises:
    ConfigError: if shapes or dtypes disagree, the implementation is unknown,
      or it does not support the case.

  References:
    FlashAttention-2, arXiv 2307.08691. GQA, arXiv 2305.13245.
  """
  _check_shapes(query_BxTxHxC, key_BxSxKxC, value_BxSxKxC, segment_ids_BxT)
  _, length, _, head_dim = query_BxTxHxC.shape
  case = AttentionCase.traced(
    length,
    head_dim,
    str(query_BxTxHxC.dtype),
    None if segment_ids_BxT is None else str(segment_ids_BxT.dtype),
  )
  name = choose_attention(case, implementation).name
  return IMPLEMENTATIONS[name].run(
    query_BxTxHxC, key_BxSxKxC, value_BxSxKxC, segment_ids_BxT
  )


def choose_attention(
  case: AttentionCase,
  implementation: str | None = None,
  *,
  platform: str | None = None,
) -> Choice:
  """Returns the implementation that serves a case.

  A name is refused on a platform that it does not run on. The devices that are
  compiled for need not be there; `cudnn` needs JAX's CUDA plug-in all the same.

  Args:
    case: what is computed.
    implementation: a name, or None for the first that supports the case of
      `splash` (tpu), `cudnn` (gpu), `xla`.
    platform: as for `choice.choose`.

  Raises:
    ConfigError: if the implementation is unknown or does not support the case.
  """
  return choose(
    "attention", case, IMPLEMENTATIONS, AUTOMATIC, implementation, platform
  )


def splash_tile(length: int) -> int:
  """Edge of the square tiles of splash: the largest that divides T."""
  return next(tile for tile in (512, 384, 256, LANES) if length % tile == 0)


def _xla(query_BxTxHxC, key_BxSxKxC, value_BxSxKxC, segment_ids_BxT):
  """The definition that every other implementation is tested against."""
  batch, length, num_heads, head_dim = query_BxTxHxC.shape
  wide = jnp.promote_types(query_BxTxHxC.dtype, jnp.float32)
  num_kv_heads = key_BxSxKxC.shape[2]
  query_BxTxKxGxC = query_BxTxHxC.reshape(
    batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim
  )
  scale = head_dim**-0.5
  logits_BxKxGxTxS = scale * jnp.einsum(
    "btkgc,bskc->bkgts",
    query_BxTxKxGxC,
    key_BxSxKxC,
    preferred_element_type=wide,
  )
  mask_BxTxS = jnp.tril(jnp.ones((length, length), bool))[None]
  if segment_ids_BxT is not None:
    mask_BxTxS &= segment_ids_BxT[:, :, None] == segment_ids_BxT[:, None, :]
  # A token always sees itself, so that no row is fully masked.
  logits_BxKxGxTxS = jnp.where(
    mask_BxTxS[:, None, None], logits_BxKxGxTxS, jnp.finfo(wide).min
  )
  weights = jax.nn.softmax(logits_BxKxGxTxS, axis=-1)
  mixed_BxTxKxGxC = jnp.einsum(
    "bkgts,bskc->btkgc", weights.astype(value_BxSxKxC.dtype), value_BxSxKxC
  )
  return mixed_BxTxKxGxC.reshape(query_BxTxHxC.shape)


def _xla_refusal(case: AttentionCase) -> str | None:
  del case
  return None


def _splash(
  query_BxTxHxC,
  key_BxSxKxC,
  value_BxSxKxC,
  segment_ids_BxT,
  *,
  interpret: bool = False,
):
  """Splash on each device's rows and heads."""
  arrays = [query_BxTxHxC, key_BxSxKxC, value_BxSxKxC]
  if segment_ids_BxT is not None:
    arrays.append(segment_ids_BxT)
  kernel = partial(_splash_kernel, interpret=interpret)
  sharding = active_sharding()
  if sharding is None:
    return kernel(*arrays)
  heads = ("batch", None, "heads", None)
  kv_heads = ("batch", None, "kv_heads", None)
  in_axes = (heads, kv_heads, kv_heads, ("batch", None))[: len(arrays)]
  return sharding.shard_map(kernel, in_axes, heads)(*arrays)


def _splash_kernel(
  query_BxTxHxC,
  key_BxSxKxC,
  value_BxSxKxC,
  segment_ids_BxT=None,
  *,
  interpret: bool,
):
  """JAX's TPU kernel; grouped heads are not repeated in memory.

  The kernel object holds arrays of the trace that makes it: it is not cached.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
    splash_attention_mask as masks,
  )

  _, length, num_heads, head_dim = query_BxTxHxC.shape
  tile = splash_tile(length)
  kernel = kernels.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
    block_sizes=kernels.BlockSizes(
      block_q=tile,
      block_kv=tile,
      block_q_dkv=tile,
      block_kv_dkv=tile,
      block_q_dq=tile,
      block_kv_dq=tile,
    ),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  # The kernel does not scale. A bfloat16 product would round the scale too.
  query = query_BxTxHxC.astype(jnp.float32) * head_dim**-0.5
  query = query.astype(query_BxTxHxC.dtype)
  segments = None
  if segment_ids_BxT is not None:
    ids = segment_ids_BxT.astype(jnp.int32)
    segments = kernels.SegmentIds(q=ids, kv=ids)
  heads_first = (x.swapaxes(1, 2) for x in (query, key_BxSxKxC, value_BxSxKxC))
  return jax.vmap(kernel)(*heads_first, segments).swapaxes(1, 2)


def _splash_interpret(*args):
  return _splash(*args, interpret=True)


def _splash_refusal(case: AttentionCase) -> str | None:
  if case.dtype not in ("bfloat16", "float32"):
    return f"it computes in bfloat16 or float32, the dtype is {case.dtype}"
  if case.context > 1:
    return f"T must be whole, it is split over context {case.context}"
  if case.length % LANES:
    return f"T must be a multiple of {LANES}, it is {case.length}"
  if case.head_dim > MAX_SPLASH_HEAD_DIM:
    return f"head_dim is at most {MAX_SPLASH_HEAD_DIM}, it is {case.head_dim}"
  if case.segment_dtype is not None and not np.can_cast(
    case.segment_dtype, "int32"
  ):
    return f"segment ids must fit int32, their dtype is {case.segment_dtype}"
  return None


def _cudnn(query_BxTxHxC, key_BxSxKxC, value_BxSxKxC, segment_ids_BxT):
  """JAX's cuDNN kernel; segments become a bias, which cuDNN does not skip.

  Its packed layout would need no bias, but wants contiguous segments, a bound
  on their number, and Hopper; and JAX 0.10 has wrong offsets in it for K < H.
  """
  mask_Bx1xTxS = None
  if segment_ids_BxT is not None:
    mask_Bx1xTxS = (
      segment_ids_BxT[:, None, :, None] == segment_ids_BxT[:, None, None, :]
    )
  return jax.nn.dot_product_attention(
    query_BxTxHxC,
    key_BxSxKxC,
    value_BxSxKxC,
    mask=mask_Bx1xTxS,
    is_causal=True,
    implementation="cudnn",
  )


def _cudnn_refusal(case: AttentionCase) -> str | None:
  if case.dtype not in ("bfloat16", "float16"):
    return f"it computes in bfloat16 or float16, the dtype is {case.dtype}"
  if not has_cuda_plugin():
    return "JAX has no CUDA plug-in here (jax[cuda12] or jax[cuda13])"
  capability = case.compute_capability
  refusal = gpu_refusal(capability)
  if refusal is not None:
    return refusal
  # Ahead of time, on a host without a GPU, the least that may be there.
  widest = 256 if float(capability or "8.0") >= 9 else 128
  if case.head_dim > widest or case.head_dim % 8:
    return (
      f"head_dim must be a multiple of 8 and at most {widest}, it is"
      f" {case.head_dim}"
    )
  if case.segment_dtype is not None and case.length % 2:
    return f"segment ids need an even T, it is {case.length}"
  return None


class Implementation(NamedTuple):
  """One row of the table.

  Attributes:
    run: (query, key, value, segment_ids) -> mixed.
    refusal: case -> why it is not supported, or None.
    platform: the only one that it runs on; None: any.
  """

  run: Callable[..., jax.Array]
  refusal: Callable[[AttentionCase], str | None]
  platform: str | None = None


IMPLEMENTATIONS: Mapping[str, Implementation] = types.MappingProxyType(
  {
    "splash": Implementation(_splash, _splash_refusal, "tpu"),
    "cudnn": Implementation(_cudnn, _cudnn_refusal, "gpu"),
    "xla": Implementation(_xla, _xla_refusal),
    "splash_interpret": Implementation(_splash_interpret, _splash_refusal),
  }
)
AUTOMATIC = ("splash", "cudnn", "xla")


def _check_shapes(query, key, value, segment_ids) -> None:
  if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
    raise ConfigError(
      "attention takes queries [B, T, H, C], and keys and values [B, T, K, C]"
      f" of one shape; they are {query.shape}, {key.shape}, {value.shape}."
    )
  batch, length, num_heads, head_dim = query.shape
  num_kv_heads = key.shape[2]
  if key.shape != (batch, length, num_kv_heads, head_dim):
    raise ConfigError(
      f"queries {query.shape} and keys {key.shape} must agree in all but the"
      " number of heads."
    )
  if num_kv_heads == 0 or num_heads % num_kv_heads:
    raise ConfigError(
      f"{num_heads} query heads are not divisible by {num_kv_heads} key heads."
    )
  if not query.dtype == key.dtype == value.dtype:
    raise ConfigError(
      "queries, keys and values must have one dtype; they have"
      f" {query.dtype}, {key.dtype}, {value.dtype}."
    )
  if segment_ids is None:
    return
  if segment_ids.shape != (batch, length):
    raise ConfigError(
      f"segment_ids have shape {segment_ids.shape}; queries {query.shape} need"
      f" {(batch, length)}."
    )
  if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ConfigError(
      f"segment_ids must be integers, their dtype is {segment_ids.dtype}."
    )
