"""The study: which residual routing helps, and why, at twelve layers.

    python -m train.study configs/study.py --out runs/study

Two learning rates are tuned first, one for models without learned reads and one
for models with them; docs/study.md says what came out. 68 runs, about four
hours on two idle CPU cores, estimated from the time of single steps.
"""

import dataclasses
from typing import Any

from configs import small
from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
UNROUTED = ("standard", "embedding_skip")
ROUTED = (
  *("attnres_block", "attnres_full", "delta", "delta_block"),
  *("delta_block_closed", "delta_block_released", "rd_attnres"),
  "rd_delta_block",
)
# The released code draws its queries; here they start at zero.
DRAWN = ("attnres_block", "delta_block")
# Beside the standard model, which all are compared with.
PAIRS = {
  # Questions 1 to 3.
  "delta_block": (
    *("attnres_block", "embedding_skip", "delta_block_released"),
    "delta_block_closed",
  ),
  "delta_block_drawn": ("attnres_block_drawn", "delta_block"),
  "attnres_block_drawn": ("attnres_block",),
  # Question 3: true block deltas, with and without the open block.
  "delta_block_closed": ("delta_block_released",),
  "delta": ("attnres_full", "embedding_skip", "delta_block"),
  # Question 4: roles on top of replacement, and on top of addition.
  "rd_attnres": ("attnres_block",),
  "rd_delta_block": ("delta_block",),
}


def get_config() -> Study:
  """The study."""
  return make_study(
    UNROUTED, (*ROUTED, *(f"{name}_drawn" for name in DRAWN)), RATES
  )


def make_study(
  unrouted: tuple[str, ...],
  routed: tuple[str, ...],
  rates: tuple[float, ...],
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
  **training: Any,
) -> Study:
  """A study of some arms.

  Args:
    unrouted: arms that share the learning rate of the first.
    routed: arms that share the learning rate of `delta_block`.
    rates: that are tried.
    seeds: of the comparison.
    **training: fields of TrainingConfig.
  """
  base = small.get_config()
  base = dataclasses.replace(
    base, training=dataclasses.replace(base.training, **training)
  )
  arms = (*unrouted, *routed)
  return Study(
    comparison=Comparison(
      base=base,
      arms={name: _arm(name) for name in arms},
      baseline=unrouted[0],
      pairs={
        name: tuple(other for other in others if other in arms)
        for name, others in PAIRS.items()
        if name in arms
      },
      seeds=seeds,
    ),
    candidates={f"{rate:g}": _schedule(rate) for rate in rates},
    groups={unrouted[0]: unrouted, "delta_block": routed},
    tuning_seed=100,
    analysed_seed=seeds[0],
  )


def _arm(name: str) -> dict[str, Any]:
  variant = name.removesuffix("_drawn")
  fields: dict[str, Any] = {"model.routing.variant": variant}
  if variant != name:
    fields["model.routing.query_init_std"] = 0.02
  return fields


def _schedule(rate: float) -> dict[str, Any]:
  return {
    "optimizer.learning_rate": rate,
    "optimizer.final_learning_rate": rate / 10,
  }
