"""Tunes, compares and looks inside: a whole study, in one command.

    python -m train.study configs/study.py --out runs/study
    python -m train.study configs/study.py --out runs/study \\
        --document docs/study.md

The same command goes on where it was interrupted. The output directory gets
`tuning` and `comparison` (docs/comparison.md), `routing` (docs/analysis.md) and
study.md, the tables of all three. With --document they also replace what stands
between the lines `<!-- measured -->` and `<!-- end -->` of a file, and the
figures are copied beside it.
"""

import json
import os
import pathlib
import shutil
from typing import Any

from deltajax.analysis.report import JSON_NAME as ROUTING_JSON
from deltajax.comparison import report
from deltajax.comparison.plan import Comparison
from deltajax.comparison.runner import spent_seconds
from deltajax.comparison.study import Study, TuningResult
from deltajax.comparison.study_tables import (
  check_document,
  measured,
  with_measured,
)
from deltajax.files import write_file
from train import analyze
from train.cli import main, parse_study, StudyRun
from train.compare import train_and_report

TABLES = "study.md"
CAPTIONS = {
  "differences.png": "Paired differences of validation loss",
  "losses.png": "Validation loss of each run",
  "curves.png": "Loss over the runs",
}


def parse(arguments: list[str]) -> tuple[Study, StudyRun]:
  """Parses the command line."""
  return parse_study("python -m train.study", arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Does what is not done yet, and writes the tables."""
  study, options = parse(arguments)
  if options.document is not None:
    check_document(options.document)
  out = options.out
  print("tuning")
  tuning_result = train_and_report(study.tuning(), out / "tuning")
  tuning = TuningResult.of(study, tuning_result)
  for arm, name in tuning.chosen.items():
    print(f"          {arm}: {name}, for {', '.join(study.groups[arm])}")
  print("comparison")
  comparison = study.tuned(tuning.chosen)
  result = train_and_report(comparison, out / "comparison")
  print("routing")
  routing = look_inside(comparison, study.analysed_seed, out)

  seconds = sum(spent_seconds(out / x) for x in ("tuning", "comparison"))

  def text(figures: dict[str, str]) -> str:
    return measured(
      study, tuning, result, routing, seconds=seconds, figures=figures
    )

  made = out / "comparison" / report.FIGURES
  own = {
    text: os.path.relpath(made / name, out) for name, text in CAPTIONS.items()
  }
  write_file(out / TABLES, text(own) + "\n")
  print(f"study     {out / TABLES}")
  if options.document is not None:
    document = options.document
    beside = document.parent / "figures"
    beside.mkdir(exist_ok=True)
    copies = {}
    for name, caption in CAPTIONS.items():
      copy = beside / f"{document.stem}-{name}"
      shutil.copyfile(made / name, copy)
      copies[caption] = os.path.relpath(copy, document.parent)
    write_file(document, with_measured(document, text(copies)))
    print(f"document  {document}")


def look_inside(
  comparison: Comparison, seed: int, out: pathlib.Path
) -> dict[str, Any]:
  """Analyses the models of a seed, unless that was done; returns the numbers.

  Args:
    comparison: whose runs are done.
    seed: of the models.
    out: directory of the study.
  """
  links = out / "models"
  links.mkdir(exist_ok=True)
  runs = comparison.runs(out / "comparison")
  models = []
  for run in runs:
    if run.seed != seed:
      continue
    # A model is named after its run's directory.
    link = links / run.arm
    if not link.is_symlink():
      link.symlink_to(os.path.relpath(run.directory, links))
    models.append(link)
  routing = out / "routing"
  if _names(routing) != [link.name for link in models]:
    analyze.command([*map(str, models), "--out", str(routing)])
  values: dict[str, Any] = json.loads((routing / ROUTING_JSON).read_text())
  return values


def _names(routing: pathlib.Path) -> list[str]:
  """Of the models that were analysed."""
  path = routing / ROUTING_JSON
  if not path.exists():
    return []
  return [model["name"] for model in json.loads(path.read_text())["models"]]


if __name__ == "__main__":
  main(command)
