"""The README tells the truth about names, and its Python runs."""

import pathlib
import re

import pytest

from deltajax.routing.variants import VARIANTS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_table_lists_every_variant_and_no_other():
  rows = [line.split("|")[1] for line in README.splitlines() if "|" in line]
  named = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row)}
  assert named == set(VARIANTS)


@pytest.mark.parametrize(
  "code", re.findall(r"```python\n(.*?)```", README, re.DOTALL)
)
def test_python_runs(code):
  names = {}
  exec(code, names)
  assert names["logits"].shape == (2, 16, 256)


def test_links_lead_somewhere():
  links = re.findall(r"\]\(([^)#:]+)\)", README)
  assert links
  for link in links:
    assert (ROOT / link).exists(), link
