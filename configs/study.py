"""The study: which residual routing helps, and why, at twelve layers.

    python -m train.study configs/study.py --out runs/study

Four learning rates are tuned first, one for each family of arms; docs/study.md
says what came out. 91 runs, about five hours on two idle CPU cores.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from configs import small
from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study

RATES = (2e-3, 4e-3, 8e-3, 16e-3)
# Standard deviation of initial queries: that of the released code, and the one
# with which logits here, at width 64, spread as those do at width 1024.
DRAWN = {"_drawn": 0.02, "_drawn_wide": 0.02 * (1024 / 64) ** 0.5}
# The arm that is tuned -> those that get its learning rate.
FAMILIES = {
  "standard": ("standard",),
  "embedding_skip": ("embedding_skip",),
  "attnres_block": (
    *("attnres_block", "attnres_full", "rd_attnres"),
    *("attnres_block_drawn", "attnres_block_drawn_wide"),
  ),
  "delta_block": (
    *("delta_block", "delta", "delta_block_closed", "delta_block_released"),
    *("rd_delta_block", "delta_block_drawn", "delta_block_drawn_wide"),
    "delta_block_released_drawn_wide",
  ),
}
# Beside the standard model, which all are compared with.
PAIRS = {
  # Questions 1 to 3.
  "delta_block": (
    *("attnres_block", "embedding_skip", "delta_block_released"),
    "delta_block_closed",
  ),
  "delta": ("attnres_full", "embedding_skip", "delta_block"),
  # Question 1: queries that are drawn, for both.
  "delta_block_drawn": ("attnres_block_drawn", "delta_block"),
  "attnres_block_drawn": ("attnres_block",),
  "delta_block_drawn_wide": ("attnres_block_drawn_wide", "delta_block"),
  "attnres_block_drawn_wide": ("attnres_block",),
  # Question 3: true block deltas, with and without the open block.
  "delta_block_closed": ("delta_block_released", "embedding_skip"),
  "delta_block_released": ("attnres_block",),
  # What the released code compares, both as it draws queries.
  "delta_block_released_drawn_wide": ("attnres_block_drawn_wide",),
  # Question 4: roles on top of replacement, and on top of addition.
  "rd_attnres": ("attnres_block",),
  "rd_delta_block": ("delta_block",),
}


def get_config() -> Study:
  """The study."""
  return make_study(FAMILIES, RATES)


def make_study(
  families: Mapping[str, tuple[str, ...]],
  rates: tuple[float, ...],
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
  **training: Any,
) -> Study:
  """A study of some arms.

  Args:
    families: arm that is tuned -> arms that get its learning rate, named after
      their variant and how their queries begin. The first is the baseline.
    rates: that are tried.
    seeds: of the comparison.
    **training: fields of TrainingConfig.
  """
  base = small.get_config()
  base = dataclasses.replace(
    base, training=dataclasses.replace(base.training, **training)
  )
  arms = [name for family in families.values() for name in family]
  return Study(
    comparison=Comparison(
      base=base,
      arms={name: _arm(name) for name in arms},
      baseline=next(iter(families)),
      pairs={
        name: tuple(other for other in others if other in arms)
        for name, others in PAIRS.items()
        if name in arms
      },
      seeds=seeds,
    ),
    candidates={f"{rate:g}": _schedule(rate) for rate in rates},
    groups=dict(families),
    tuning_seed=100,
    analysed_seed=seeds[0],
  )


def _arm(name: str) -> dict[str, Any]:
  variant, drawn, kind = name.partition("_drawn")
  fields: dict[str, Any] = {"model.routing.variant": variant}
  if drawn:
    fields["model.routing.query_init_std"] = DRAWN[drawn + kind]
  return fields


def _schedule(rate: float) -> dict[str, Any]:
  return {
    "optimizer.learning_rate": rate,
    "optimizer.final_learning_rate": rate / 10,
  }
