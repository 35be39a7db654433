"""Next-token loss that never holds float32 logits of a whole batch.

Shapes: B batch, T sequence, D width, V vocabulary, N tiles, L tokens of a
sequence in a tile.
"""

import dataclasses

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


@flax.struct.dataclass
class TokenScores:
  """How well a model predicts each of some tokens.

  Attributes:
    nats_BxT: negative log-likelihood of the token, float32 or wider.
    greedy_BxT: whether it is the most likely one; of equals, the first.
  """

  nats_BxT: jax.Array
  greedy_BxT: jax.Array


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
  tiling = _Tiling.create(hidden_BxTxD, head_DxV, tile_length)
  head_DxV = _head_for_tiles(head_DxV)

  @jax.checkpoint
  def add_tile(sums, tile):
    hidden_BxLxD, targets_BxL, mask_BxL = tile
    logits_BxLxV = _tile_logits(hidden_BxLxD, head_DxV)
    log_z_BxL, target_logit_BxL = _log_likelihood(logits_BxLxV, targets_BxL)
    new = LossSums(
      loss=jnp.sum(jnp.where(mask_BxL, log_z_BxL - target_logit_BxL, 0)),
      z_loss=jnp.sum(jnp.where(mask_BxL, jnp.square(log_z_BxL), 0)),
      tokens=jnp.sum(mask_BxL, dtype=jnp.int32),
    )
    return sums + new, None

  wide = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  zero = LossSums(jnp.zeros((), wide), jnp.zeros((), wide), jnp.int32(0))
  sums, _ = jax.lax.scan(
    add_tile,
    zero,
    tuple(map(tiling.split, (hidden_BxTxD, targets_BxT, mask_BxT))),
  )
  return sums


def token_scores(
  hidden_BxTxD: jax.Array,
  head_DxV: jax.Array,
  targets_BxT: jax.Array,
  *,
  tile_length: int | None = None,
) -> TokenScores:
  """The terms of `token_loss`, one by one; not made for gradients.

  Args:
    hidden_BxTxD: as for `token_loss`, like all others.
    head_DxV: see there.
    targets_BxT: see there.
    tile_length: see there.
  """
  tiling = _Tiling.create(hidden_BxTxD, head_DxV, tile_length)
  head_DxV = _head_for_tiles(head_DxV)

  def score(_, tile):
    hidden_BxLxD, targets_BxL = tile
    logits_BxLxV = _tile_logits(hidden_BxLxD, head_DxV)
    log_z_BxL, target_logit_BxL = _log_likelihood(logits_BxLxV, targets_BxL)
    greedy_BxL = jnp.argmax(logits_BxLxV, axis=-1) == targets_BxL
    return None, TokenScores(log_z_BxL - target_logit_BxL, greedy_BxL)

  _, scores = jax.lax.scan(
    score, None, tuple(map(tiling.split, (hidden_BxTxD, targets_BxT)))
  )
  return jax.tree.map(tiling.join, scores)


@dataclasses.dataclass(frozen=True)
class _Tiling:
  """How a sequence is cut into tiles.

  A tile takes every num_tiles-th position, so that each shard of a split
  sequence has its part of every tile.
  """

  length: int
  tile_length: int

  @classmethod
  def create(cls, hidden_BxTxD, head_DxV, tile_length) -> "_Tiling":
    batch, length, _ = hidden_BxTxD.shape
    if tile_length is None:
      sharding = active_sharding()
      axes = ("batch", "sequence", "vocab")
      parts = sharding.num_shards(*axes) if sharding else 1
      tile_length = _TILE_ELEMENTS * parts // (batch * head_DxV.shape[1])
    return cls(length, min(max(tile_length, 1), length))

  @property
  def num_tiles(self) -> int:
    return -(-self.length // self.tile_length)

  def split(self, x: jax.Array) -> jax.Array:
    """[B, T, ...] to [N, B, L, ...]; the end is padded."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, self.num_tiles * self.tile_length - self.length)
    x = jnp.pad(x, pad)
    x = x.reshape(len(x), self.tile_length, self.num_tiles, *x.shape[2:])
    return jnp.moveaxis(x, 2, 0)

  def join(self, x: jax.Array) -> jax.Array:
    """[N, B, L] to [B, T]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(len(x), -1)[:, : self.length]


def _head_for_tiles(head_DxV: jax.Array) -> jax.Array:
  """The head, brought together once rather than by every tile.

  It is not cast, so that tiles add up their gradients in its dtype.
  """
  return constrain(head_DxV, "features", "vocab")


def _tile_logits(hidden_BxLxD: jax.Array, head_DxV: jax.Array) -> jax.Array:
  return constrain(
    output_logits(hidden_BxLxD, head_DxV), "batch", "sequence", "vocab"
  )


def _log_likelihood(
  logits_BxLxV: jax.Array, targets_BxL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Log-normalisers, and the logits of the targets."""
  log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
  # A masked sum, not a gather, which would bring a split vocabulary together.
  ids_V = jnp.arange(logits_BxLxV.shape[-1])
  target_logit_BxL = jnp.sum(
    jnp.where(ids_V == targets_BxL[..., None], logits_BxLxV, 0), axis=-1
  )
  return log_z_BxL, target_logit_BxL
