"""Trains arms of a comparison with the same seeds, and compares them in pairs.

    python -m train.compare configs/compare_rd.py --out runs/compare_rd
    python -m train.compare configs/compare_rd.py --out runs/compare_rd \\
        --arms attnres_block rd_attnres --seeds 0 1 --training.steps 200

Each arm and seed is a run of its own, in a process of its own; the same command
goes on where it was interrupted. The output directory gets comparison.json,
comparison.md and figures (docs/comparison.md).
"""

from collections.abc import Sequence
import pathlib
import sys

from deltajax.comparison import figures, report, runner
from deltajax.comparison.compare import compare
from deltajax.comparison.finished import check_finished, finished_runs
from deltajax.comparison.plan import Comparison
from deltajax.comparison.results import ComparisonResult
from deltajax.comparison.runner import Failure
from deltajax.training.run_data import load_data
from train.cli import CompareRun, main, parse_compare

RUN = (sys.executable, "-m", "train.compare_run")


def parse(arguments: list[str]) -> tuple[Comparison, CompareRun]:
  """Parses the command line."""
  return parse_compare("python -m train.compare", arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Trains what is not trained, then reports."""
  comparison, options = parse(arguments)
  failures = train_all(comparison, options.out, report_only=options.report_only)
  write_report(
    *(comparison, options.out, failures), exclude_failed=options.exclude_failed
  )


def train_all(
  comparison: Comparison, out: pathlib.Path, *, report_only: bool = False
) -> list[Failure]:
  """Trains what is not trained; returns the runs that died.

  Args:
    comparison: what to train.
    out: where runs and report lie.
    report_only: train nothing, and return those that died before.

  Raises:
    ConfigError: for data, directories or runs that cannot be used, and as soon
      as runs that are done cannot be compared.
  """
  runs = comparison.runs(out)
  figures.check_matplotlib()
  report.check_output(out)
  runner.check_runs(runs)
  if report_only:
    return [x for x in map(runner.find_failure, runs) if x is not None]
  load_data(comparison.base)
  return runner.execute(runs, RUN, check=lambda: check_finished(runs))


def write_report(
  comparison: Comparison,
  out: pathlib.Path,
  failures: Sequence[Failure],
  *,
  exclude_failed: bool,
) -> ComparisonResult:
  """Writes what the runs of a comparison say, and returns it.

  Args:
    comparison: that was trained.
    out: where runs and report lie.
    failures: runs of it that died.
    exclude_failed: leave these out.

  Raises:
    ConfigError: for runs that are missing or cannot be compared.
    RunStopped: if runs died, and are not to be left out.
  """
  finished = finished_runs(
    comparison.runs(out), failures, exclude_failed=exclude_failed
  )
  result = compare(comparison, finished, failures)
  report.write_report(out, comparison, result)
  print(report.summary(result))
  print(f"report    {out / report.MARKDOWN_NAME}")
  print(f"numbers   {out / report.JSON_NAME}")
  return result


if __name__ == "__main__":
  main(command)
