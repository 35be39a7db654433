"""Schedules against tables written by hand, and properties of all of them."""

import dataclasses
import re

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from deltajax.routing import (
  build_schedule,
  ConfigError,
  RoutingConfig,
  VARIANTS,
)
from deltajax.routing.schedule import check_group
from tests.routing import oracle

# Six layers in three blocks: sublayers 0-3, 4-7 and 8-11. A row is a sublayer,
# the last one ("final") the final read.
FULL = """
  0: e
  1: e v0
  2: e v0 v1
  3: e v0 v1 v2
  4: e v0 v1 v2 v3
  5: e v0 v1 v2 v3 v4
  6: e v0 v1 v2 v3 v4 v5
  7: e v0 v1 v2 v3 v4 v5 v6
  8: e v0 v1 v2 v3 v4 v5 v6 v7
  9: e v0 v1 v2 v3 v4 v5 v6 v7 v8
  10: e v0 v1 v2 v3 v4 v5 v6 v7 v8 v9
  11: e v0 v1 v2 v3 v4 v5 v6 v7 v8 v9 v10
  final: e v0 v1 v2 v3 v4 v5 v6 v7 v8 v9 v10 v11
"""
BLOCKS = """
  0: e
  1: e b1+
  2: e b1+
  3: e b1+
  4: e b1
  5: e b1 b2+
  6: e b1 b2+
  7: e b1 b2+
  8: e b1 b2
  9: e b1 b2 b3+
  10: e b1 b2 b3+
  11: e b1 b2 b3+
  final: e b1 b2 b3+
"""
CLOSED = """
  0:
  1: e
  2: e
  3: e
  4: e b1
  5: e b1
  6: e b1
  7: e b1
  8: e b1 b2
  9: e b1 b2
  10: e b1 b2
  11: e b1 b2
  final:
"""
# The attention of a boundary layer does not see what is appended there, its
# MLP does; r1 is D1 = p_4 - e, r2 is e + D2 = p_8 - D1.
RELEASED = """
  0:
  1: e
  2: e
  3: e
  4: e
  5: e r1
  6: e r1
  7: e r1
  8: e r1
  9: e r1 r2
  10: e r1 r2
  11: e r1 r2
  final:
"""
STATES = """
  0:
  1: p1
  2: p1 p2
  3: p1 p2 p3
  4: p1 p2 p3 p4
  5: p1 p2 p3 p4 p5
  6: p1 p2 p3 p4 p5 p6
  7: p1 p2 p3 p4 p5 p6 p7
  8: p1 p2 p3 p4 p5 p6 p7 p8
  9: p1 p2 p3 p4 p5 p6 p7 p8 p9
  10: p1 p2 p3 p4 p5 p6 p7 p8 p9 p10
  11: p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11
  final:
"""
DELTAS_AND_STREAM = """
  0: p0
  1: v0 p1
  2: v0 v1 p2
  3: v0 v1 v2 p3
  4: v0 v1 v2 v3 p4
  5: v0 v1 v2 v3 v4 p5
  6: v0 v1 v2 v3 v4 v5 p6
  7: v0 v1 v2 v3 v4 v5 v6 p7
  8: v0 v1 v2 v3 v4 v5 v6 v7 p8
  9: v0 v1 v2 v3 v4 v5 v6 v7 v8 p9
  10: v0 v1 v2 v3 v4 v5 v6 v7 v8 v9 p10
  11: v0 v1 v2 v3 v4 v5 v6 v7 v8 v9 v10 p11
  final:
"""
ALL_STATES = """
  0: e
  1: e p1
  2: e p1 p2
  3: e p1 p2 p3
  4: e p1 p2 p3 p4
  5: e p1 p2 p3 p4 p5
  6: e p1 p2 p3 p4 p5 p6
  7: e p1 p2 p3 p4 p5 p6 p7
  8: e p1 p2 p3 p4 p5 p6 p7 p8
  9: e p1 p2 p3 p4 p5 p6 p7 p8 p9
  10: e p1 p2 p3 p4 p5 p6 p7 p8 p9 p10
  11: e p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11
  final:
"""
NOTHING = "".join(f"{s}:\n" for s in [*range(12), "final"])
EMBEDDING = "".join(f"{s}: e\n" for s in range(12)) + "final:\n"


def additive(table):
  """The same reads without the first and the final one."""
  return re.sub(
    r"final: .*", "final:", re.sub(r"\b0: .*", "0:", table, count=1)
  )


TABLES = {
  "standard": NOTHING,
  "attnres_full": FULL,
  "attnres_block": BLOCKS,
  "delta": additive(FULL),
  "delta_block": additive(BLOCKS),
  "delta_block_closed": CLOSED,
  "delta_block_released": RELEASED,
  "rd_attnres": BLOCKS,
  "rd_delta": additive(FULL),
  "rd_delta_block": additive(BLOCKS),
  "rd_tied": BLOCKS,
  "rd_average": BLOCKS,
  "rd_frozen_v": BLOCKS,
  "full_additive": STATES,
  "delta_replace": DELTAS_AND_STREAM,
  "full_replace": ALL_STATES,
  "embedding_skip": EMBEDDING,
  "embedding_skip_scaled": EMBEDDING,
}

# Five layers in two blocks, of three and of two layers.
UNEVEN_BLOCKS = """
  0: e
  1: e b1+
  2: e b1+
  3: e b1+
  4: e b1+
  5: e b1+
  6: e b1
  7: e b1 b2+
  8: e b1 b2+
  9: e b1 b2+
  final: e b1 b2+
"""
UNEVEN_TABLES = {
  "attnres_block": UNEVEN_BLOCKS,
  "delta_block": additive(UNEVEN_BLOCKS),
  "rd_delta_block": additive(UNEVEN_BLOCKS),
  "delta_block_closed": """
    0:
    1: e
    2: e
    3: e
    4: e
    5: e
    6: e b1
    7: e b1
    8: e b1
    9: e b1
    final:
  """,
  "delta_block_released": """
    0:
    1: e
    2: e
    3: e
    4: e
    5: e
    6: e
    7: e r1
    8: e r1
    9: e r1
    final:
  """,
}


def read(table):
  """{sublayer, or None for the final read: names of its sources}."""
  rows = (line.split(":") for line in table.strip().splitlines())
  return {
    None if s.strip() == "final" else int(s): names.split() for s, names in rows
  }


def check(schedule, table):
  expected = read(table)
  assert len(expected) == schedule.num_sublayers + 1
  assert {s: schedule.sources(s) for s in expected} == expected
  assert (schedule.final is None) == (not expected[None])
  for s, names in expected.items():
    # The reads that the model makes: a prefix of the memory, then perhaps the
    # running source, which is no slot.
    step = schedule.final if s is None else schedule.step(s)
    if step is not None:
      is_open = bool(names) and names[-1] not in schedule.slot_names
      assert (step.reads_running, step.visible) == (
        is_open,
        len(names) - is_open,
      )


@pytest.mark.smoke
@pytest.mark.parametrize("variant", VARIANTS)
def test_six_layers_in_three_blocks(variant):
  routing = RoutingConfig(variant=variant, num_blocks=3)
  check(build_schedule(routing, 6), TABLES[variant])


@pytest.mark.parametrize("variant", UNEVEN_TABLES)
def test_five_layers_in_two_blocks(variant):
  routing = RoutingConfig(variant=variant, num_blocks=2)
  check(build_schedule(routing, 5), UNEVEN_TABLES[variant])


def test_blocks_of_one_sublayer_are_attnres_full():
  full, block = VARIANTS["attnres_full"], VARIANTS["attnres_block"]
  assert full == dataclasses.replace(
    block, block="sublayer", summary=full.summary
  )
  # A block of one sublayer closes at once: it is never open while the next
  # one reads. Only the last stays open, for the final read.
  schedule = build_schedule(RoutingConfig(variant="attnres_full"), 2)
  assert [len(schedule.sources(s)) for s in (0, 1, 2, 3, None)] == [
    1,
    2,
    3,
    4,
    5,
  ]
  assert not schedule.steps.reads_running.any()
  assert schedule.final.reads_running


@pytest.mark.parametrize("layers, blocks", [(3, 4), (1, 2)])
@pytest.mark.parametrize("variant", ["attnres_block", "delta_block_released"])
def test_more_blocks_than_layers_raises_with_both_numbers(
  variant, layers, blocks
):
  routing = RoutingConfig(variant=variant, num_blocks=blocks)
  with pytest.raises(ConfigError, match=rf"{blocks}\b.*\b{layers} layers"):
    build_schedule(routing, layers)


def test_no_layers_raises():
  with pytest.raises(ConfigError, match="num_layers is 0"):
    build_schedule(RoutingConfig(), 0)


@pytest.mark.parametrize("variant", ["attnres_full", "delta", "standard"])
def test_sublayer_blocks_do_not_ask_for_layers(variant):
  build_schedule(RoutingConfig(variant=variant, num_blocks=4), 2)


@st.composite
def schedules(draw):
  """(routing, number of layers, schedule)."""
  layers = draw(st.integers(1, 20))
  routing = RoutingConfig(
    variant=draw(st.sampled_from(sorted(VARIANTS))),
    num_blocks=draw(st.integers(1, layers)),
  )
  return routing, layers, build_schedule(routing, layers)


@given(schedules())
def test_appends_fill_the_memory_in_order(drawn):
  _, layers, schedule = drawn
  steps, names = schedule.steps, schedule.slot_names
  assert all(len(x) == schedule.num_sublayers == 2 * layers for x in steps)
  assert all(x.shape == (layers, 2) for x in schedule.by_layer())
  assert len(names) == len(set(names)) == schedule.num_slots
  free = int(names[:1] == ("e",))
  for s in range(2 * layers):
    assert steps.visible[s] <= free  # reads only what has been written
    assert steps.slot[s] < max(schedule.num_slots, 1)
    if steps.closes[s]:
      assert steps.slot[s] == free
      free += 1
  assert free == schedule.num_slots
  if schedule.final is not None:
    assert schedule.final.visible == schedule.num_slots
    assert not schedule.final.closes


@given(schedules(), st.integers(1, 5))
def test_groups_store_what_came_before_them(drawn, group):
  _, layers, schedule = drawn
  one = schedule.by_layer()
  for x, y in zip(one, schedule.steps, strict=True):
    np.testing.assert_array_equal(x.ravel(), y)
  if layers % group:
    return
  rows = schedule.by_layer(group)
  for g, (visible, stored) in enumerate(
    zip(rows.visible, rows.stored, strict=True)
  ):
    before = schedule.num_slots - schedule.steps.closes[2 * group * g :].sum()
    assert stored.tolist() == np.minimum(visible, before).tolist()


@pytest.mark.parametrize(
  ("variant", "group"),
  [("delta", 3), ("attnres_full", 6), ("delta_block", 1), ("standard", 1)],
)
def test_groups_that_can_be(variant, group):
  check_group(RoutingConfig(variant=variant), 6, group)


@pytest.mark.parametrize(
  ("variant", "group", "message"),
  [
    ("delta", 4, "read_group is 4; .* num_layers 6: one of 1, 2, 3, 6"),
    ("delta", 0, "read_group is 0"),
    ("delta_block", 2, "read_group is 2; 'delta_block' reads few sources"),
  ],
)
def test_groups_that_cannot_be(variant, group, message):
  with pytest.raises(ConfigError, match=message):
    check_group(RoutingConfig(variant=variant), 6, group)


@given(schedules())
def test_sources_are_a_prefix_of_the_memory(drawn):
  _, layers, schedule = drawn
  for s in [*range(2 * layers), None]:
    names = schedule.sources(s)
    slots = [name for name in names if name in schedule.slot_names]
    assert slots == list(schedule.slot_names[: len(slots)])
    assert names[: len(slots)] == slots
    assert len(names) <= len(slots) + 1


@settings(deadline=None)
@given(schedules())
def test_tables_mean_what_the_papers_say(drawn):
  """Runs the tables on coefficients of e, v_0, v_1, ... as vectors."""
  routing, layers, schedule = drawn
  row, total = routing.row, 2 * layers
  e, *outputs = np.eye(total + 1)
  memory = np.full((schedule.num_slots, total + 1), np.nan)
  if row.embedding_source:
    memory[0] = e
  stream, running, streams = e, 0 * e, [e]
  size = 2 * -(-layers // routing.num_blocks)

  def check_read(s, step):
    sources = list(memory[: step.visible])
    if step.reads_running:
      sources.append(stream if row.running_source == "stream" else running)
    expected = oracle.SOURCES[routing.variant](s, e, outputs[:s], streams, size)
    np.testing.assert_array_equal(
      np.reshape(sources, (-1, total + 1)),
      np.reshape(expected, (-1, total + 1)),
    )

  for s, output in enumerate(outputs):
    step = schedule.step(s)
    check_read(s, step)
    stream, running = stream + output, running + output
    streams.append(stream)
    if step.closes:
      memory[step.slot] = {
        "delta": running,
        "state": stream,
        "difference": stream - memory[step.slot - 1],
      }[row.appends]
      running = 0 * e
  # The last block stays open, so that the final read sees its running part as
  # one source, closed or not.
  if schedule.final is not None:
    check_read(total, schedule.final)
