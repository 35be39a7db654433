"""What docs/add_a_variant.md says to do is done, and works."""

import pytest

from deltajax.routing import variants
from tests.docs.pages import entry, make_schedules
from tests.docs.test_code import example_variant
from tests.helpers import tiny_config
from tests.models import test_oracle
from tests.routing import oracle, test_schedule

PAGE = "add_a_variant.md"
(NAME,) = entry(PAGE, "deltajax/routing/variants.py", vars(variants))


@pytest.fixture
def added(monkeypatch):
  """The table, the tests' tables and the oracle with the new row."""
  tables = entry(PAGE, "tests/routing/test_schedule.py", vars(test_schedule))
  sources = entry(PAGE, "tests/routing/oracle.py", vars(oracle))
  assert [*tables] == [*sources] == [NAME]
  monkeypatch.setattr(test_schedule, "TABLES", test_schedule.TABLES | tables)
  monkeypatch.setattr(oracle, "SOURCES", oracle.SOURCES | sources)
  with example_variant():
    yield


def test_reads_what_its_table_says(added):
  test_schedule.test_six_layers_in_three_blocks(NAME)


def test_equals_its_oracle(added):
  test_oracle.check(tiny_config(NAME, num_layers=4, num_blocks=2))


def test_the_oracle_can_fail(added):
  oracle.SOURCES[NAME] = oracle.SOURCES["delta_block"]
  with pytest.raises(AssertionError):
    test_oracle.check(tiny_config(NAME, num_layers=4, num_blocks=2))


def test_pictures_are_those_of_the_code():
  files = {x.name: x.read_text() for x in make_schedules.DIRECTORY.iterdir()}
  pictures = make_schedules.pictures()
  assert sorted(files) == sorted(pictures)
  stale = [name for name, svg in pictures.items() if files[name] != svg]
  assert not stale, "run python docs/make_schedules.py"
