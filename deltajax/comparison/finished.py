"""Runs that are done, and whether they can be compared."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

from deltajax.comparison.plan import PlannedRun
from deltajax.comparison.record import (
  Outcome,
  read_metrics,
  read_outcome,
  read_start,
  Start,
)
from deltajax.comparison.results import Curve
from deltajax.comparison.runner import Failure, is_finished
from deltajax.config import ConfigError
from deltajax.training.stopping import RunStopped


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """A run that is done, and what it left.

  Attributes:
    planned: which.
    start: what it began with.
    outcome: how it ended.
    metrics: lines of metrics.jsonl.
  """

  planned: PlannedRun
  start: Start
  outcome: Outcome
  metrics: Sequence[Mapping[str, float]]

  @classmethod
  def read(cls, planned: PlannedRun) -> "FinishedRun":
    """Reads a run that is done."""
    outcome = read_outcome(planned.directory)
    assert outcome is not None
    return cls(
      planned,
      read_start(planned.directory),
      outcome,
      read_metrics(planned.directory),
    )

  def logged(self, name: str) -> Curve:
    """A metric over the run."""
    lines = [line for line in self.metrics if name in line]
    return Curve([int(x["step"]) for x in lines], [x[name] for x in lines])


def finished_runs(
  runs: Sequence[PlannedRun],
  failures: Sequence[Failure],
  *,
  exclude_failed: bool,
) -> list[FinishedRun]:
  """The runs that a report can be made of.

  Args:
    runs: that were asked for.
    failures: those of them that died.
    exclude_failed: leave these out.

  Raises:
    RunStopped: if runs died and are not to be left out.
    ConfigError: if runs are missing or not comparable.
  """
  died = [failure.run for failure in failures]
  if failures and not exclude_failed:
    raise RunStopped(
      f"{len(failures)} of {len(runs)} runs died; the same command tries them"
      " again, with --exclude-failed it does without them.\n"
      + "\n".join(map(str, failures))
    )
  missing = [x for x in runs if x not in died and not is_finished(x)]
  if missing:
    raise ConfigError(
      f"{len(missing)} of {len(runs)} runs are not done:"
      f" {', '.join(map(str, missing))}. Train them with the same command"
      " without --report-only, or name arms and seeds that are done with --arms"
      " and --seeds."
    )
  found = [FinishedRun.read(run) for run in runs if run not in died]
  check_comparable(found)
  return found


def check_finished(runs: Sequence[PlannedRun]) -> None:
  """Raises ConfigError if the runs that are done cannot be compared."""
  check_comparable([FinishedRun.read(run) for run in runs if is_finished(run)])


def check_comparable(runs: Sequence[FinishedRun]) -> None:
  """Raises ConfigError unless runs read the same and began the same.

  All have the same training and validation rows; those of a seed have them in
  the same order, and the same initial values of all parameters that they share.
  """
  for run in runs[1:]:
    _check_same_data(runs[0], run, ("train", "validation"))
    if _logged_steps(run) != _logged_steps(runs[0]):
      raise ConfigError(
        f"{run.planned} logged its loss after other updates than"
        f" {runs[0].planned}; train both with the same training.log_every."
      )
  for same_seed in _by_seed(runs).values():
    for run in same_seed[1:]:
      _check_same_data(same_seed[0], run, ("order",))
    for first, second in itertools.combinations(same_seed, 2):
      unequal = [
        name
        for name in same_shape(first.start, second.start)
        if first.start.shared[name] != second.start.shared[name]
      ]
      if unequal:
        raise ConfigError(
          f"{first.planned} and {second.planned} began with other values of"
          f" {len(unequal)} parameters that they share, the first is"
          f" {unequal[0]}. Were they trained with other versions of JAX"
          " or deltajax?"
        )


def _check_same_data(
  first: FinishedRun, second: FinishedRun, fields: Sequence[str]
) -> None:
  what = {
    "train": "other training rows",
    "validation": "other validation batches",
    "order": "its training rows in another order",
  }
  for field in fields:
    one, other = (getattr(x.start.data, field) for x in (first, second))
    if one != other:
      raise ConfigError(
        f"{second.planned} read {what[field]} than {first.planned}"
        f" (digest {other[:12]}, not {one[:12]}); losses on unequal data cannot"
        " be compared. Train both with the same data, batch size and Python."
      )


def same_shape(first: Start, second: Start) -> list[str]:
  """Parameters that both have, in the same shape and type."""

  def form(start: Start, name: str) -> str:
    return start.shared[name].rsplit(" ", 1)[0]

  return [
    name
    for name in first.shared
    if name in second.shared and form(first, name) == form(second, name)
  ]


def _logged_steps(run: FinishedRun) -> list[int]:
  return run.logged("train/loss").steps


def _by_seed(runs: Sequence[FinishedRun]) -> dict[int, list[FinishedRun]]:
  found: dict[int, list[FinishedRun]] = {}
  for run in runs:
    found.setdefault(run.planned.seed, []).append(run)
  return found
