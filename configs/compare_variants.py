"""Every variant beside a standard transformer.

    python -m train.compare configs/compare_variants.py \\
        --out runs/compare_variants

54 runs of about three minutes each on two idle CPU cores; the same command goes
on where it was interrupted, and `--arms` and `--seeds` name a part.
"""

from configs import small
from deltajax.comparison.plan import Comparison
from deltajax.routing.variants import VARIANTS


def get_config() -> Comparison:
  """The comparison."""
  return Comparison(
    base=small.get_config(),
    arms={name: {"model.routing.variant": name} for name in VARIANTS},
    baseline="standard",
    seeds=(0, 1, 2),
  )
