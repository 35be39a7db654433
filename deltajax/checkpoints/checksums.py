"""Whether what was read is what was written."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from deltajax.files import digest_of


class ChecksumError(RuntimeError):
  """Something came back other than it was saved; it is named."""


@jax.jit
def _sums(tree: Any) -> Any:
  return jax.tree.map(_sum, tree)


def _sum(x: jax.Array) -> jax.Array:
  """The bits of an array as one uint32.

  A sum of words, each times an odd number that depends on its place: a word
  that changes, or trades places, changes it.
  """
  bits = min(jnp.dtype(x.dtype).itemsize * 8, 32)
  words = jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)
  # A 64-bit number is two words, along an axis of their own.
  stride = math.prod(words.shape)
  odd = jnp.ones((), jnp.uint32)
  for axis, size in enumerate(words.shape):
    stride //= size or 1
    place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    odd += place * jnp.uint32(2 * stride % 2**32)
  return jnp.sum(words * odd, dtype=jnp.uint32)


def checksums(tree: Any) -> dict[str, int]:
  """One number for each array, whatever its sharding: path -> checksum."""
  leaves = jax.tree_util.tree_leaves_with_path(_sums(tree))
  return {jax.tree_util.keystr(path): int(x) for path, x in leaves}


def check(tree: Any, expected: dict[str, int]) -> None:
  """Raises ChecksumError unless all arrays are those that were summed."""
  found = checksums(tree)
  wrong = [path for path, x in found.items() if expected.get(path) != x]
  if wrong:
    raise ChecksumError(
      f"{len(wrong)} of {len(found)} arrays are not what was saved, the first"
      f" is {wrong[0]}"
    )


def check_values(values: Any, expected: str | None) -> None:
  """Raises ChecksumError unless values have the digest that was saved."""
  if digest_of(values) != expected:
    raise ChecksumError(
      "the config, or the position in the data, is not what was saved"
    )
