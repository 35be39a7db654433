"""Next-token loss that never holds float32 logits of a whole batch.

Shapes: B batch, T sequence, D width, V vocabulary, N tiles, L tokens of a
sequence in a tile.
"""

import flax.struct
import jax
import jax.numpy as jnp

from deltajax.models.transformer import output_logits
from deltajax.routing.sharding import active_sharding, constrain

# Logits of one tile on one device: 64 Mi elements, 256 MiB in float32.
_TILE_ELEMENTS = 2**26


@flax.struct.dataclass
class LossSums:
  """Sums over counted tokens; divide once, by the tokens of a whole update.

  Attributes:
    loss: negative log-likelihood in nats.
    z_loss: squared log-normalisers.
    tokens: how many tokens were counted.
  """

  loss: jax.Array
  z_loss: jax.Array
  tokens: jax.Array

  def __add__(self, other: "LossSums") -> "LossSums":
    return jax.tree.map(jnp.add, self, other)


def token_loss(
  hidden_BxTxD: jax.Array,
  head_DxV: jax.Array,
  targets_BxT: jax.Array,
  mask_BxT: jax.Array,
  *,
  tile_length: int | None = None,
) -> LossSums:
  """Cross entropy in float32, tile by tile along the sequence.

  Each tile's logits are computed, used and, in the backward pass, computed
  again. Sequences are tiled rather than flattened tokens, so that a sharded
  batch axis stays whole. Any vocabulary and any length will do.

  Args:
    hidden_BxTxD: inputs of the output head.
    head_DxV: its matrix.
    targets_BxT: token ids to predict.
    mask_BxT: which of them count; gradients at others are exactly zero.
    tile_length: L. None: so that a tile's logits have about 64 Mi elements on
      each device.
  """
  batch, length, _ = hidden_BxTxD.shape
  if tile_length is None:
    sharding = active_sharding()
    parts = sharding.num_shards("batch", "sequence", "vocab") if sharding else 1
    tile_length = _TILE_ELEMENTS * parts // (batch * head_DxV.shape[1])
  tile_length = min(max(tile_length, 1), length)
  num_tiles = -(-length // tile_length)
  # Brought together here, once, rather than by every tile; not cast, so that
  # tiles add up their gradients in its dtype.
  head_DxV = constrain(head_DxV, "features", "vocab")

  def tiles(x):
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, num_tiles * tile_length - length)
    x = jnp.pad(x, pad)
    # A tile takes every num_tiles-th position, so that each shard of a split
    # sequence has its part of every tile.
    x = x.reshape(batch, tile_length, num_tiles, *x.shape[2:])
    return jnp.moveaxis(x, 2, 0)

  @jax.checkpoint
  def add_tile(sums, tile):
    hidden_BxLxD, targets_BxL, mask_BxL = tile
    logits_BxLxV = constrain(
      output_logits(hidden_BxLxD, head_DxV), "batch", "sequence", "vocab"
    )
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    # A masked sum, not a gather, which would bring a split vocabulary together.
    ids_V = jnp.arange(head_DxV.shape[1])
    target_logit_BxL = jnp.sum(
      jnp.where(ids_V == targets_BxL[..., None], logits_BxLxV, 0), axis=-1
    )
    new = LossSums(
      loss=jnp.sum(jnp.where(mask_BxL, log_z_BxL - target_logit_BxL, 0)),
      z_loss=jnp.sum(jnp.where(mask_BxL, jnp.square(log_z_BxL), 0)),
      tokens=jnp.sum(mask_BxL, dtype=jnp.int32),
    )
    return sums + new, None

  wide = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  zero = LossSums(jnp.zeros((), wide), jnp.zeros((), wide), jnp.int32(0))
  sums, _ = jax.lax.scan(
    add_tile, zero, (tiles(hidden_BxTxD), tiles(targets_BxT), tiles(mask_BxT))
  )
  return sums
