"""Role-Decoupled AttnRes beside Block AttnRes, with the controls of its paper.

    python -m train.compare configs/compare_rd.py --out runs/compare_rd

`rd_tied` is its parent, read twice; `rd_average` has two queries and one input;
`rd_frozen_v` reads V uniformly (arXiv 2608.01075).
"""

from configs import small
from deltajax.comparison.plan import Comparison

ARMS = ("attnres_block", "rd_attnres", "rd_tied", "rd_average", "rd_frozen_v")


def get_config() -> Comparison:
  """The comparison."""
  return Comparison(
    base=small.get_config(),
    arms={name: {"model.routing.variant": name} for name in ARMS},
    baseline="attnres_block",
    seeds=(0, 1, 2),
  )
