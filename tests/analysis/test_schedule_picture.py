"""Pictures of schedules show what the tables say."""

from xml.etree import ElementTree

import pytest

from deltajax.analysis.schedule_picture import picture_rows, schedule_picture
from deltajax.routing import build_schedule, RoutingConfig, VARIANTS
from tests.routing.test_schedule import read, TABLES


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_read_what_the_tables_by_hand_say(variant):
  rows = picture_rows(RoutingConfig(variant=variant, num_blocks=3), 6)
  expected = list(read(TABLES[variant]).values())
  if len(rows) == 12:  # no final read
    assert expected.pop() == []
  found = [list(row.reads) for row in rows]
  assert found == [[x.removesuffix("+") for x in names] for names in expected]


@pytest.mark.parametrize("variant", ["delta_block", "full_additive", "delta"])
def test_rows_store_what_is_a_slot_afterwards(variant):
  routing = RoutingConfig(variant=variant, num_blocks=3)
  rows = picture_rows(routing, 6)
  slots = list(build_schedule(routing, 6).slot_names)
  stored = [row.appends for row in rows if row.appends]
  assert (["e"] if "e" in slots else []) + stored == slots
  for row in rows:
    assert not set(row.hidden) & set(row.reads)
    assert set(row.hidden) <= set(slots)


def test_the_slot_that_a_boundary_layer_does_not_see_is_hidden():
  routing = RoutingConfig(variant="delta_block_released", num_blocks=3)
  rows = picture_rows(routing, 6)
  assert [row.hidden for row in rows if row.hidden] == [
    ("e",),
    ("r1",),
    ("r2",),
  ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pictures_are_well_formed_and_hold_all_that_they_draw(variant):
  svg = ElementTree.fromstring(
    schedule_picture(RoutingConfig(variant=variant, num_blocks=2), 3)
  )
  width, height = (float(svg.get(name)) for name in ("width", "height"))
  for x in svg.iter():
    if x.tag.endswith("text"):
      assert 0 <= float(x.get("x")) <= width
      assert 0 <= float(x.get("y")) <= height
    if x.tag.endswith("rect") and x in list(svg):
      assert float(x.get("x", 0)) + float(x.get("width")) <= width
      assert float(x.get("y", 0)) + float(x.get("height")) <= height
