"""AdamW whose exceptions are made by parameter name, never by rank.

Scanned parameters are stacked, so that a norm's weight has two axes; only its
name tells what it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from deltajax.config import OptimizerConfig

# Leaves of the parameter tree that are matrices and are decayed. All others
# (norm scales, routing queries, key norms, gates, null sources) are not.
DECAYED = frozenset({"kernel", "embedding", "head"})


def _mask(is_in: Callable[[str], bool]) -> Callable[[Any], Any]:
  """A function from parameters to a tree of booleans, by the leaf's name."""
  return lambda params: jax.tree_util.tree_map_with_path(
    lambda path, _: is_in(path[-1].key), params
  )


decay_mask = _mask(lambda name: name in DECAYED)
query_mask = _mask(lambda name: name == "query")


def learning_rate_schedule(
  config: OptimizerConfig, steps: int
) -> optax.Schedule:
  """Linear warm-up, then cosine decay that ends with the last update.

  The first update (count 0) already learns; the last one (count steps - 1)
  uses `final_learning_rate`.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0 if config.warmup_steps else config.learning_rate,
    peak_value=config.learning_rate,
    warmup_steps=config.warmup_steps,
    decay_steps=steps,
    end_value=config.final_learning_rate,
  )
  return lambda count: schedule(count + 1)


def make_optimizer(
  config: OptimizerConfig, steps: int
) -> optax.GradientTransformation:
  """AdamW with clipping, decay by name and a multiplier for routing queries.

  Args:
    config: the options.
    steps: updates of the whole run, for the cosine.
  """
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.scale_by_adam(config.b1, config.b2, config.eps),
    optax.add_decayed_weights(config.weight_decay, decay_mask),
    optax.masked(optax.scale(config.query_multiplier), query_mask),
    optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
  )
