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

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

from deltajax.analysis.report import JSON_NAME as ROUTING_JSON
from deltajax.comparison import figures, report
from deltajax.comparison.plan import Comparison, PlannedRun
from deltajax.comparison.record import read_outcome
from deltajax.comparison.runner import is_finished, spent_seconds
from deltajax.comparison.study import Study, TuningResult
from deltajax.comparison.study_tables import (
  check_document,
  measured,
  with_measured,
)
from deltajax.files import write_file
from deltajax.training.stopping import UNHEALTHY
from train import analyze
from train.cli import main, parse_study, StudyRun
from train.compare import train_all, write_report

TABLES = "study.md"
ANALYSED = "analysed.json"
CAPTIONS = {
  figures.DIFFERENCES: "Paired differences of validation loss",
  figures.LOSSES: "Validation loss of each run",
  figures.CURVES: "Loss over the runs",
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
  tuning = tune(study, out / "tuning", exclude_failed=options.exclude_failed)
  for arm, name in tuning.chosen.items():
    print(f"          {arm}: {name}, for {', '.join(study.groups[arm])}")
  print("comparison")
  comparison = study.tuned(tuning.chosen)
  failures = train_all(comparison, out / "comparison")
  result = write_report(
    *(comparison, out / "comparison", failures),
    exclude_failed=options.exclude_failed,
  )
  print("routing")
  routing = look_inside(comparison, study.analysed_seed, out)

  seconds = spent_seconds(
    [
      *study.tuning().runs(out / "tuning"),
      *comparison.runs(out / "comparison"),
    ]
  )

  def text(pictures: dict[str, str]) -> str:
    return measured(
      study, tuning, result, routing, seconds=seconds, figures=pictures
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


def tune(
  study: Study, out: pathlib.Path, *, exclude_failed: bool
) -> TuningResult:
  """Tries all candidates; one whose run diverges is worse than all others.

  Args:
    study: whose schedules are tuned.
    out: where runs and report lie.
    exclude_failed: the same for a run that died of anything else.

  Raises:
    RunStopped: if runs died of anything else, or all did.
  """
  tuning = study.tuning()
  failures = train_all(tuning, out)
  dead = {failure.run.arm for failure in failures}
  alive = [arm for arm in tuning.arms if arm not in dead]
  diverged = all(failure.exit_code == UNHEALTHY for failure in failures)
  result = write_report(
    *(tuning.narrowed(alive, ()), out, failures),
    exclude_failed=bool(alive) and (diverged or exclude_failed),
  )
  return TuningResult.of(study, result)


def look_inside(
  comparison: Comparison, seed: int, out: pathlib.Path
) -> dict[str, Any]:
  """Analyses the models of a seed, unless that was done; returns the numbers.

  Args:
    comparison: whose runs are done, but for those that died.
    seed: of the models.
    out: directory of the study.
  """
  runs = [
    run
    for run in comparison.runs(out / "comparison")
    if run.seed == seed and is_finished(run)
  ]
  routing, done = out / "routing" / ROUTING_JSON, out / ANALYSED
  # Which runs, and how they ended: another model ends otherwise.
  wanted = json.dumps({str(run): _end(run) for run in runs}, indent=1)
  if not routing.exists() or not done.exists() or done.read_text() != wanted:
    done.unlink(missing_ok=True)
    models = _links(runs, out / "models")
    analyze.command([*map(str, models), "--out", str(routing.parent)])
    write_file(done, wanted)
  values: dict[str, Any] = json.loads(routing.read_text())
  return values


def _end(run: PlannedRun) -> dict[str, Any]:
  outcome = read_outcome(run.directory)
  assert outcome is not None
  return dataclasses.asdict(outcome)


def _links(
  runs: Sequence[PlannedRun], directory: pathlib.Path
) -> list[pathlib.Path]:
  """Links to runs, since a model is named after its run's directory."""
  directory.mkdir(exist_ok=True)
  links = [directory / run.arm for run in runs]
  for run, link in zip(runs, links, strict=True):
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(run.directory, directory))
  return links


if __name__ == "__main__":
  main(command)
