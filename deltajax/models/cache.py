"""Keys and values of the tokens that a model has seen.

Depth routing needs no cache: it mixes vectors of one token, never tokens.

Shapes: B batch, T tokens, S slots, H query heads, K key/value heads, G = H / K,
Z = B K, C head channels, P rotary pairs.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from deltajax.config import ModelConfig

QUERY_BLOCK = 128  # Queries that attend at once, to the slots up to the last.


@flax.struct.dataclass
class Places:
  """Where T new tokens go. Texts of unequal length end together, at one slot.

  Attributes:
    positions_BxT: in their texts; negative for padding before a text.
    slot: int32, of the first of them.
    visible_BxTxS: the slots that they see: of their text, up to their own. S
      may be less than the cache has, if no more is written.
  """

  positions_BxT: jax.Array
  slot: jax.Array
  visible_BxTxS: jax.Array

  @classmethod
  def create(
    cls, slot: jax.Array, first_B: jax.Array, length: int, extent: int
  ) -> "Places":
    """The places of T tokens.

    Args:
      slot: int32, of the first of them.
      first_B: int32, the slot at which each text begins.
      length: T.
      extent: S, at least slot + T.
    """
    slots_S = jnp.arange(extent, dtype=jnp.int32)
    own_Tx1 = (slot + slots_S[:length])[:, None]
    in_text_Bx1xS = slots_S >= first_B[:, None, None]
    return cls(
      positions_BxT=own_Tx1[:, 0] - first_B[:, None],
      slot=slot,
      visible_BxTxS=in_text_Bx1xS & (slots_S <= own_Tx1),
    )


@flax.struct.dataclass
class LayerCache:
  """Keys and values of one layer.

  Each head has its slots together, and rows and heads are one axis: products
  over slots then read the array that is written, in place. With other shapes
  the compiler copies the whole cache, for every token.

  Attributes:
    keys_ZxSxC: rotated.
    values_ZxSxC: values.
  """

  keys_ZxSxC: jax.Array
  values_ZxSxC: jax.Array

  @classmethod
  def create(
    cls, config: ModelConfig, batch: int, capacity: int
  ) -> "LayerCache":
    """An empty cache of S = `capacity` slots."""
    shape = (batch * config.num_kv_heads, capacity, config.head_dim)
    return cls(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))

  def write(
    self, key_BxTxKxC: jax.Array, value_BxTxKxC: jax.Array, slot: jax.Array
  ) -> "LayerCache":
    """Writes T tokens from `slot` on."""

    def written(cached_ZxSxC, new_BxTxKxC):
      new_BxKxTxC = new_BxTxKxC.swapaxes(1, 2)
      new_ZxTxC = new_BxKxTxC.reshape(-1, *new_BxKxTxC.shape[2:])
      return lax.dynamic_update_slice_in_dim(
        cached_ZxSxC, new_ZxTxC, slot, axis=1
      )

    return LayerCache(
      keys_ZxSxC=written(self.keys_ZxSxC, key_BxTxKxC),
      values_ZxSxC=written(self.values_ZxSxC, value_BxTxKxC),
    )

  def attend(
    self, query_BxTxHxC: jax.Array, visible_BxTxS: jax.Array
  ) -> jax.Array:
    """Returns mixed_BxTxHxC; as `dot_product_attention`.

    Args:
      query_BxTxHxC: rotated, H a multiple of K.
      visible_BxTxS: the slots that they see, S of the cache or fewer. Token t
        sees none of the last T - 1 - t. Who sees none, padding, is given
        something finite.
    """
    length, extent = visible_BxTxS.shape[1:]
    mixed = []
    for start in range(0, length, QUERY_BLOCK):
      end = min(start + QUERY_BLOCK, length)
      seen = extent - (length - end)
      mixed.append(
        _attend(
          query_BxTxHxC[:, start:end],
          self.keys_ZxSxC[:, :seen],
          self.values_ZxSxC[:, :seen],
          visible_BxTxS[:, start:end, :seen],
        )
      )
    return jnp.concatenate(mixed, axis=1)


def _attend(query_BxTxHxC, keys_ZxSxC, values_ZxSxC, visible_BxTxS):
  """One block of queries, and the slots that it may see."""
  batch, length, num_heads, head_dim = query_BxTxHxC.shape
  rows, extent, _ = keys_ZxSxC.shape
  kv_heads = rows // batch
  wide = jnp.promote_types(query_BxTxHxC.dtype, jnp.float32)
  query_BxKxGxTxC = query_BxTxHxC.swapaxes(1, 2).reshape(
    batch, kv_heads, num_heads // kv_heads, length, head_dim
  )
  logits_ZxGTxS = head_dim**-0.5 * jnp.einsum(
    "zqc,zsc->zqs",
    query_BxKxGxTxC.reshape(rows, -1, head_dim),
    keys_ZxSxC,
    preferred_element_type=wide,
  )
  logits_BxKxGxTxS = jnp.where(
    visible_BxTxS[:, None, None],
    logits_ZxGTxS.reshape(*query_BxKxGxTxC.shape[:-1], extent),
    jnp.finfo(wide).min,
  )
  weights_BxKxGxTxS = jax.nn.softmax(logits_BxKxGxTxS, axis=-1)
  mixed_ZxGTxC = jnp.einsum(
    "zqs,zsc->zqc",
    weights_BxKxGxTxS.astype(values_ZxSxC.dtype).reshape(logits_ZxGTxS.shape),
    values_ZxSxC,
  )
  mixed_BxHxTxC = mixed_ZxGTxC.reshape(batch, num_heads, length, head_dim)
  return mixed_BxHxTxC.swapaxes(1, 2)
