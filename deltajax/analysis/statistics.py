"""Sums over the tokens of a batch, from which all figures of a run are made.

Sums of batches add up to the sum of all their rows. What is squared is taken
from its uniform value first, so that a spread of zero comes out as zero.

Shapes: L layers, R reads, H heads, N all columns of the captured weights, B
batch, T sequence, D width, S stacked vectors, P bins of positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
import numpy as np


def position_edges(length: int) -> np.ndarray:
  """First positions of the bins: 0, 1, 2, 4, 8, ..., below `length`."""
  return np.array([0, *(2**k for k in range(max(length - 1, 0).bit_length()))])


def in_bins(positions_BxT: jax.Array, edges_P: np.ndarray) -> jax.Array:
  """Which bin a position is in, as bins_BxTxP of zeros and ones."""
  reached_BxTxP = positions_BxT[..., None] >= edges_P
  return reached_BxTxP & ~jnp.pad(
    reached_BxTxP[..., 1:], ((0, 0), (0, 0), (0, 1))
  )


def weight_sums(
  weights_LxRxHxNxBxT: jax.Array,
  seen_LxN: np.ndarray,
  mask_BxT: jax.Array,
  bins_BxTxP: jax.Array,
) -> dict[str, Any]:
  """Sums over tokens, means over heads, of what a router's reads weigh.

  Args:
    weights_LxRxHxNxBxT: routing weights; 0 in columns that are not seen.
    seen_LxN: which columns each layer sees.
    mask_BxT: which tokens count.
    bins_BxTxP: the bin of each token's position.

  Returns:
    `weight` and `weight_squared` [L, R, N], less 1/n of the n seen sources;
    `largest` (less 1/n) and `entropy` (nats, less ln n), and their squares
    [L, R]; `effective`, e to the entropy [L, R]; `weight_by_position`
    [L, R, P, N] and `largest_by_position` [L, R, P], less 1/n; for two reads
    also `divergence` and its square [L]: Jensen-Shannon, nats.
  """
  heads = weights_LxRxHxNxBxT.shape[2]
  dtype = weights_LxRxHxNxBxT.dtype
  counts_L = np.maximum(seen_LxN.sum(1), 1)
  uniform_LxN = seen_LxN / counts_L[:, None]
  mask_BxT = mask_BxT.astype(dtype)
  bins_BxTxP = bins_BxTxP.astype(dtype) * mask_BxT[..., None]

  def over(equation, *arrays):
    summed = jnp.einsum(equation, *arrays, precision=jax.lax.Precision.HIGHEST)
    return summed / heads

  def at_layers(values_L):
    values_L = jnp.asarray(values_L, dtype)
    return values_L.reshape(-1, *(1 for _ in "RHBT"))

  centred_LxRxHxNxBxT = weights_LxRxHxNxBxT - jnp.asarray(
    uniform_LxN[:, None, None, :, None, None], dtype
  )
  largest_LxRxHxBxT = weights_LxRxHxNxBxT.max(3) - at_layers(1 / counts_L)
  entropy_LxRxHxBxT = entropy(weights_LxRxHxNxBxT, axis=3)
  excess_LxRxHxBxT = entropy_LxRxHxBxT - at_layers(np.log(counts_L))
  per_read = "lrhbt,bt->lr"
  sums = {
    "weight": over("lrhnbt,bt->lrn", centred_LxRxHxNxBxT, mask_BxT),
    "weight_squared": over(
      "lrhnbt,bt->lrn", jnp.square(centred_LxRxHxNxBxT), mask_BxT
    ),
    "largest": over(per_read, largest_LxRxHxBxT, mask_BxT),
    "largest_squared": over(per_read, jnp.square(largest_LxRxHxBxT), mask_BxT),
    "entropy": over(per_read, excess_LxRxHxBxT, mask_BxT),
    "entropy_squared": over(per_read, jnp.square(excess_LxRxHxBxT), mask_BxT),
    "effective": over(per_read, jnp.exp(entropy_LxRxHxBxT), mask_BxT),
    "weight_by_position": over(
      "lrhnbt,btp->lrpn", centred_LxRxHxNxBxT, bins_BxTxP
    ),
    "largest_by_position": over(
      "lrhbt,btp->lrp", largest_LxRxHxBxT, bins_BxTxP
    ),
  }
  if weights_LxRxHxNxBxT.shape[1] == 2:
    divergence_LxHxBxT = jensen_shannon(
      weights_LxRxHxNxBxT[:, 0], weights_LxRxHxNxBxT[:, 1], axis=2
    )
    square_LxHxBxT = jnp.square(divergence_LxHxBxT)
    sums["divergence"] = over("lhbt,bt->l", divergence_LxHxBxT, mask_BxT)
    sums["divergence_squared"] = over("lhbt,bt->l", square_LxHxBxT, mask_BxT)
  return sums


def entropy(weights: jax.Array, axis: int) -> jax.Array:
  """Entropy in nats of distributions along an axis; 0 ln 0 is 0."""
  return -xlogy(weights, weights).sum(axis)


def jensen_shannon(one: jax.Array, other: jax.Array, axis: int) -> jax.Array:
  """Jensen-Shannon divergence in nats: 0 where equal, ln 2 where disjoint."""
  mixed = entropy((one + other) / 2, axis)
  apart = (entropy(one, axis) + entropy(other, axis)) / 2
  return jnp.maximum(mixed - apart, 0)


def cosine_sums(x_SxBxTxD: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Sums over tokens of the cosine of every two vectors, [S, S].

  A vector of zeros has cosine 0 with all, itself included.
  """
  wide = jnp.promote_types(x_SxBxTxD.dtype, jnp.float32)
  x_SxBxTxD = x_SxBxTxD.astype(wide)
  square_SxBxT = jnp.sum(jnp.square(x_SxBxTxD), -1)
  inverse_SxBxT = jnp.where(
    square_SxBxT > 0, jax.lax.rsqrt(jnp.maximum(square_SxBxT, 1e-30)), 0
  )
  unit_SxBxTxD = x_SxBxTxD * (inverse_SxBxT * mask_BxT)[..., None]
  return jnp.einsum(
    "sbtd,ubtd->su",
    unit_SxBxTxD,
    unit_SxBxTxD,
    precision=jax.lax.Precision.HIGHEST,
  )


def rms_sums(x_SxBxTxD: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Sums over tokens of the root mean square over channels, [S]."""
  wide = jnp.promote_types(x_SxBxTxD.dtype, jnp.float32)
  rms_SxBxT = jnp.sqrt(jnp.mean(jnp.square(x_SxBxTxD.astype(wide)), -1))
  return token_sums(rms_SxBxT, mask_BxT)


def norm_sums(x_SxBxTxD: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Sums over tokens of the Euclidean norm, [S]."""
  return rms_sums(x_SxBxTxD, mask_BxT) * np.sqrt(x_SxBxTxD.shape[-1])


def token_sums(x: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Sums over the last two axes, B and T, of tokens that count."""
  return jnp.where(mask_BxT, x, 0).sum((-2, -1))


def effective_rank(cosines_SxS: np.ndarray) -> float:
  """Effective rank of the S unit vectors of mean cosines.

  They are rows of a matrix [S, tokens * D] with one unit vector for each
  token; its singular values are known from their mean cosines. 1 if all are
  parallel at every token, S if no two have anything in common.

  References:
    Roy and Vetterli, The effective rank, EUSIPCO 2007.
  """
  eigenvalues = np.linalg.eigvalsh(np.asarray(cosines_SxS, np.float64))
  singular = np.sqrt(np.maximum(eigenvalues, 0))
  if not singular.sum():
    return 0.0
  share = singular / singular.sum()
  return float(np.exp(-xlogy_host(share).sum()))


def xlogy_host(x: np.ndarray) -> np.ndarray:
  """X ln x in NumPy; 0 where x is 0."""
  return x * np.log(np.where(x > 0, x, 1))
