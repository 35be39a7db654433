"""Draws the schedule of every variant: python docs/make_schedules.py.

The pictures are committed, so that pages have them wherever they are read; a
test says when they are not those of the code.
"""

from collections.abc import Mapping
import pathlib
import re
from unittest import mock

from deltajax.analysis.schedule_picture import schedule_picture
from deltajax.routing import RoutingConfig, variants

DOCS = pathlib.Path(__file__).parent
DIRECTORY = DOCS / "schedules"
NUM_LAYERS, NUM_BLOCKS = 6, 3


def entry(page: str, file: str, names: Mapping[str, object]) -> dict:
  """An entry of a table that a page adds to a file.

  Args:
    page: of docs/; its block of code has the file's path as title.
    file: path of the file.
    names: what the file defines.
  """
  text = (DOCS / page).read_text()
  block = re.search(rf'^```python title="{file}"\n(.*?)^```', text, re.M | re.S)
  assert block, f"{page} has no block for {file}"
  return eval("{" + block[1] + "}", dict(names))


def pictures() -> dict[str, str]:
  """File name -> SVG, of every variant and that of add_a_variant.md."""
  example = entry(
    "add_a_variant.md", "deltajax/routing/variants.py", vars(variants)
  )
  table = {**variants.VARIANTS, **example}
  with mock.patch.object(variants, "VARIANTS", table):
    return {
      f"{variant}.svg": schedule_picture(
        RoutingConfig(variant=variant, num_blocks=NUM_BLOCKS), NUM_LAYERS
      )
      for variant in table
    }


if __name__ == "__main__":
  DIRECTORY.mkdir(exist_ok=True)
  for name, svg in pictures().items():
    (DIRECTORY / name).write_text(svg)
