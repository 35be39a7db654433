"""Draws the schedule of every variant: python docs/make_schedules.py.

The pictures are committed, so that pages have them wherever they are read; a
test says when they are not those of the code.
"""

import pathlib

from deltajax.analysis.schedule_picture import schedule_picture
from deltajax.routing import RoutingConfig, VARIANTS

DIRECTORY = pathlib.Path(__file__).parent / "schedules"
NUM_LAYERS, NUM_BLOCKS = 6, 3


def pictures() -> dict[str, str]:
  """File name -> SVG, of every variant."""
  return {
    f"{variant}.svg": schedule_picture(
      RoutingConfig(variant=variant, num_blocks=NUM_BLOCKS), NUM_LAYERS
    )
    for variant in VARIANTS
  }


if __name__ == "__main__":
  DIRECTORY.mkdir(exist_ok=True)
  for name, svg in pictures().items():
    (DIRECTORY / name).write_text(svg)
