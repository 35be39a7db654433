"""Which updates are made, and which are skipped because they would do harm."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from deltajax.config import HealthConfig

# Of the running mean and variance of the loss, in updates.
MEMORY = 100.0
# Updates before which the mean and variance are not trusted.
WARM_UP = 50


@flax.struct.dataclass
class Health:
  """What is known of the updates so far; all are scalars.

  Attributes:
    made: int32, updates that were made.
    in_a_row: int32, updates that were skipped since the last that was made.
    skipped: int32, updates that were skipped in all.
    mean: float32, running mean of the loss.
    square: float32, running mean of its square's distance from the mean.
  """

  made: jax.Array
  in_a_row: jax.Array
  skipped: jax.Array
  mean: jax.Array
  square: jax.Array

  @classmethod
  def new(cls) -> "Health":
    """Before the first update."""
    zero, no = jnp.int32(0), jnp.float32(0)
    return cls(made=zero, in_a_row=zero, skipped=zero, mean=no, square=no)


def judge(
  config: HealthConfig, health: Health, loss: jax.Array, norm: jax.Array
) -> tuple[jax.Array, Health]:
  """Whether to make an update, and what is known after it.

  An update is skipped if its loss or its gradient's norm is not finite, or its
  loss is a spike: more than `config.spike` standard deviations above the
  running mean of those before it.

  Args:
    config: what counts as a spike.
    health: before the update.
    loss: of the update.
    norm: of its gradient.
  """
  loss = loss.astype(jnp.float32)
  good = jnp.isfinite(loss) & jnp.isfinite(norm)
  if config.spike is not None:
    bound = health.mean + config.spike * jnp.sqrt(health.square)
    good &= (health.made < WARM_UP) | (loss <= bound)
  # A plain mean at first, then one that forgets.
  weight = 1.0 / jnp.minimum(health.made + 1.0, MEMORY)
  change = loss - health.mean
  mean = health.mean + weight * change
  square = (1 - weight) * (health.square + weight * change**2)
  made = Health(
    made=health.made + 1,
    in_a_row=jnp.int32(0),
    skipped=health.skipped,
    mean=mean,
    square=square,
  )
  skipped = dataclasses.replace(
    health, in_a_row=health.in_a_row + 1, skipped=health.skipped + 1
  )
  return good, choose(good, made, skipped)


def choose(good: jax.Array, new: Any, old: Any) -> Any:
  """One of two trees."""
  return jax.tree.map(lambda x, y: jnp.where(good, x, y), new, old)
