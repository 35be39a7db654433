"""The parts of a Qwen3- or Llama-style transformer layer.

Shapes: B batch, T sequence, D width, H query heads, C head channels, P rotary
pairs, F mlp width, U roles.
"""

from functools import partial
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from deltajax.config import ModelConfig
from deltajax.models.attention import dot_product_attention
from deltajax.models.cache import LayerCache, Places
from deltajax.routing.sharding import constrain


class RMSNorm(nn.Module):
  """Root mean square norm: statistics in float32, scaled in the input dtype.

  The cast to the input dtype comes before the product with the weight, as in
  Hugging Face models.

  Attributes:
    eps: added to the mean square.
    axis_name: logical axis of the weight.
    param_dtype: dtype of the weight.
  """

  eps: float
  axis_name: str = "embed"
  param_dtype: str = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Norms the last axis of x."""
    init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis_name,))
    scale: Any = self.param(
      "scale", init, x.shape[-1:], jnp.dtype(self.param_dtype)
    )
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
    return (wide * rstd).astype(x.dtype) * scale.astype(x.dtype)


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
  """Returns the angle per position of every rotated pair, float64 [C/2]."""
  exponent = np.arange(0, config.head_dim, 2) / config.head_dim
  frequency = config.rope_theta**-exponent
  scaling = config.rope_scaling
  if scaling.kind == "none":
    return frequency
  periods = frequency * scaling.original_length / (2 * np.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = np.clip((periods - low) / (high - low), 0, 1)
  return frequency * (kept + (1 - kept) / scaling.factor)


class Rotation(NamedTuple):
  """Of every rotated pair at every position; all layers are given the same.

  Attributes:
    cos_BxTxP: of the angles.
    sin_BxTxP: of the angles.
  """

  cos_BxTxP: jax.Array
  sin_BxTxP: jax.Array

  @classmethod
  def create(cls, positions_BxT: jax.Array, config: ModelConfig) -> "Rotation":
    """The rotation at these positions.

    Args:
      positions_BxT: integers.
      config: of the model; angles are float32, or float64 with its dtype.
    """
    wide = jnp.promote_types(config.dtype, jnp.float32)
    frequencies_P = jnp.asarray(rotary_frequencies(config), wide)
    angles_BxTxP = positions_BxT[..., None].astype(wide) * frequencies_P
    return cls(jnp.cos(angles_BxTxP), jnp.sin(angles_BxTxP))


def rotate(x_BxTxNxC: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotates channel pairs (i, i + C/2), as Hugging Face models do."""
  cos, sin = (x[:, :, None] for x in rotation)
  first, second = jnp.split(x_BxTxNxC.astype(sin.dtype), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x_BxTxNxC.dtype)


class Attention(nn.Module):
  """Causal grouped-query attention whose Q/K and V may read different inputs.

  Attributes:
    config: of the model.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self,
    inputs_UxBxTxD: jax.Array,
    rotation: Rotation,
    segment_ids_BxT: jax.Array | None,
    cached: tuple[LayerCache, Places] | None = None,
  ) -> tuple[jax.Array, LayerCache | None]:
    """Returns output_BxTxD, and the cache with these tokens, if there is one.

    Args:
      inputs_UxBxTxD: normed inputs, one or two: the first feeds Q and K, the
        last feeds V.
      rotation: of the rotary embedding.
      segment_ids_BxT: of packed documents, or None.
      cached: of earlier tokens, and where these go; tokens then attend to what
        is cached, themselves included, and there are no segments.
    """
    config = self.config
    qk_BxTxD, v_BxTxD = inputs_UxBxTxD[0], inputs_UxBxTxD[-1]
    query = self._project("query", "heads", config.num_heads)(qk_BxTxD)
    key = self._project("key", "kv_heads", config.num_kv_heads)(qk_BxTxD)
    value = self._project("value", "kv_heads", config.num_kv_heads)(v_BxTxD)
    if config.qk_norm:
      query = self._head_norm("query_norm")(query)
      key = self._head_norm("key_norm")(key)
    # Every query needs all keys: keys and values are gathered over `sequence`.
    whole = ("batch", None, "kv_heads", "head_dim")
    heads = ("batch", "sequence", "heads", "head_dim")
    query = constrain(rotate(query, rotation), *heads)
    key = constrain(rotate(key, rotation), *whole)
    value = constrain(value, *whole)
    cache = None
    if cached is not None:
      earlier, places = cached
      cache = earlier.write(key, value, places.slot)
      mixed_BxTxHxC = cache.attend(query, places.visible_BxTxS)
    else:
      # Parameters depend on no implementation: initialisation runs on any host,
      # at any length.
      mixed_BxTxHxC = dot_product_attention(
        query,
        key,
        value,
        segment_ids_BxT,
        implementation="xla" if self.is_initializing() else config.attention,
      )
    mixed_BxTxHxC = constrain(mixed_BxTxHxC, *heads)
    output_BxTxD = dense(
      config,
      "output",
      config.width,
      ("heads", "head_dim", "embed"),
      (-2, -1),
      bias=config.attention_bias,
    )(mixed_BxTxHxC)
    return output_BxTxD, cache

  def _project(self, name: str, heads_axis: str, heads: int) -> nn.Module:
    config = self.config
    axes = ("embed", heads_axis, "head_dim")
    features = (heads, config.head_dim)
    return dense(config, name, features, axes, bias=config.attention_bias)

  def _head_norm(self, name: str) -> RMSNorm:
    config = self.config
    return RMSNorm(config.norm_eps, "head_dim", config.param_dtype, name=name)


class SwiGLU(nn.Module):
  """Gated MLP: down(silu(gate(x)) * up(x)).

  Attributes:
    config: of the model.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Returns output_BxTxD."""
    config = self.config
    linear = partial(dense, config, bias=config.mlp_bias)
    into, out = ("embed", "mlp"), ("mlp", "embed")
    gate_BxTxF = linear("gate", config.mlp_width, into)(x_BxTxD)
    up_BxTxF = linear("up", config.mlp_width, into)(x_BxTxD)
    hidden_BxTxF = constrain(
      nn.silu(gate_BxTxF) * up_BxTxF, "batch", "sequence", "mlp"
    )
    return linear("down", config.width, out)(hidden_BxTxF)


def dense(
  config: ModelConfig,
  name: str,
  features: int | tuple[int, ...],
  axes: tuple[str, ...],
  contract: int | tuple[int, ...] = -1,
  bias: bool = False,
) -> nn.DenseGeneral:
  """A linear map.

  Args:
    config: of the model.
    name: of the module.
    features: output axes.
    axes: logical names of the kernel's axes.
    contract: input axes that are summed over.
    bias: whether there is one, zero at first.
  """
  inputs = 1 if isinstance(contract, int) else len(contract)
  return nn.DenseGeneral(
    features,
    axis=contract,
    use_bias=bias,
    dtype=jnp.dtype(config.dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    kernel_init=nn.with_logical_partitioning(
      nn.initializers.normal(config.init_std), axes
    ),
    bias_init=nn.with_logical_partitioning(
      nn.initializers.zeros, axes[inputs:]
    ),
    name=name,
  )
