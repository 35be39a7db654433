"""docs/comparison.md describes comparison.json as it is."""

import dataclasses
import pathlib

import pytest

from deltajax.comparison import results
from deltajax.comparison.paired import PairedStatistics
from tests.helpers import documented_fields

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "comparison.md"


def documented(of):
  return documented_fields(DOCS, "comparison.json", of)


@pytest.mark.parametrize(
  ("of", "cls"),
  [
    ("One of `arms`:", results.ArmResult),
    ("One of `runs`:", results.RunScore),
    ("One of `pairs`:", results.PairResult),
    ("`statistics`:", PairedStatistics),
    ("One of `costs`:", results.Cost),
  ],
)
def test_the_schema_is_what_the_docs_say(of, cls):
  assert documented(of) == [field.name for field in dataclasses.fields(cls)]


def test_the_file_holds_what_the_docs_say():
  fields = [x.name for x in dataclasses.fields(results.ComparisonResult)]
  assert documented("Version 1.") == ["schema", "version", "config", *fields]
