"""What a study measured, as Markdown, and the document that it goes into."""

from collections.abc import Mapping
import math
import pathlib
from typing import Any

from deltajax.comparison import tables
from deltajax.comparison.results import ComparisonResult
from deltajax.comparison.study import Study, TuningResult
from deltajax.config import ConfigError

BEGIN, END = "<!-- measured -->", "<!-- end -->"


def measured(
  study: Study,
  tuning: TuningResult,
  result: ComparisonResult,
  routing: Mapping[str, Any],
  *,
  seconds: float,
  figures: Mapping[str, str],
) -> str:
  """All tables of a study.

  Args:
    study: what was asked.
    tuning: what its first stage found.
    result: what its second stage found.
    routing: what `routing.json` holds.
    seconds: that the processes of all runs took.
    figures: caption -> where the figure lies.
  """
  pictures = [f"![{text}]({path})" for text, path in figures.items()]
  return "\n\n".join(
    [
      tables.facts(result) + " The processes of all runs, those of the tuning"
      f" included, took {seconds / 3600:.1f} hours, on"
      f" {tables.environment(result)}.",
      "### Learning rates",
      tuning_text(study, tuning),
      "### Paired differences",
      tables.differences_text(result),
      *pictures,
      "### Arms",
      tables.arms_table(result),
      "### Routing",
      f"{tables.SHARPNESS} Of the models of seed {study.analysed_seed}, on"
      f" {routing['data']['rows']} rows of the validation split.",
      sharpness_table(routing),
      "### What the arms change",
      tables.changes_table(result),
    ]
  )


def tuning_text(study: Study, tuning: TuningResult) -> str:
  """Which candidate each tuned arm keeps, and for which arms."""
  rows = [
    [
      arm,
      *(
        f"**{loss:.4f}**" if name == tuning.chosen[arm] else _loss(loss)
        for name, loss in losses.items()
      ),
      ", ".join(study.groups[arm]),
    ]
    for arm, losses in tuning.losses.items()
  ]
  text = (
    f"Validation loss of one run each, seed {study.tuning_seed}. The least of a"
    " row is used by all arms that the row names.\n\n"
    + tables.table(("arm", *study.candidates, "used by"), rows)
  )
  edge = tuning.at_edge()
  if edge:
    text += (
      f"\n\nThe best candidate of {' and '.join(edge)} is at the edge of those"
      " that were tried; a better one may lie beyond."
    )
  return text


def _loss(value: float) -> str:
  return f"{value:.4f}" if math.isfinite(value) else "died"


def sharpness_table(routing: Mapping[str, Any]) -> str:
  """One row for each model of `routing.json` that routes."""
  totals = [(x["name"], x["analysis"]["totals"]) for x in routing["models"]]
  return tables.routing_table([row for row in totals if row[1] is not None])


def check_document(path: pathlib.Path) -> None:
  """Raises ConfigError unless a file has a place for what is measured."""
  _parts(path)


def with_measured(path: pathlib.Path, text: str) -> str:
  """The file's text with another measured part."""
  before, after = _parts(path)
  return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def _parts(path: pathlib.Path) -> tuple[str, str]:
  try:
    lines = path.read_text()
  except OSError as error:
    raise ConfigError(f"--document {path} cannot be read: {error}.") from None
  before, begin, rest = lines.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not begin or not end:
    raise ConfigError(
      f"--document {path} has no lines {BEGIN} and {END}, between which the"
      " tables would go."
    )
  return before, after
