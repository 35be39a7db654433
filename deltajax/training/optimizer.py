"""AdamW whose exceptions are made by parameter name, never by rank.

Scanned parameters are stacked, so that a norm's weight has two axes; only its
name tells what it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from deltajax.config import OptimizerConfig
from deltajax.models.transformer import is_routing

# Leaves of the parameter tree that are matrices and are decayed. All others
# (norm scales, routing queries, key norms, gates, null sources) are not.
DECAYED = frozenset({"kernel", "embedding", "head"})


def decay_mask(params: Any) -> Any:
  """A tree of booleans: which parameters are decayed."""
  return _map_with_names(lambda names, _: names[-1] in DECAYED, params)


def relative_rate(config: OptimizerConfig, names: Sequence[str]) -> float:
  """Learning rate of a parameter, relative to that of the base model.

  Args:
    config: the options.
    names: path of the parameter.
  """
  if not is_routing(names):
    return 1.0
  routing, query = routing_rates(config).values()
  return query if names[-1] == "query" else routing


def routing_rates(config: OptimizerConfig) -> dict[str, float]:
  """Learning rates of `routing` and of its `query`, relative to the base's."""
  rate = config.routing_learning_rate or config.learning_rate
  relative = rate / config.learning_rate
  return {"routing": relative, "query": config.query_multiplier * relative}


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
  """AdamW with clipping, decay by name and learning rates of routing.

  Args:
    config: the options.
    steps: updates of the whole run, for the cosine.
  """
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.scale_by_adam(config.b1, config.b2, config.eps),
    optax.add_decayed_weights(config.weight_decay, decay_mask),
    optax.stateless(
      lambda updates, _: _map_with_names(
        lambda names, x: relative_rate(config, names) * x, updates
      )
    ),
    optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
  )


def _map_with_names(f: Callable[[Sequence[str], Any], Any], tree: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
    lambda path, x: f([part.key for part in path], x), tree
  )
