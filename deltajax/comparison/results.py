"""What a comparison finds, as named values; docs/comparison.md says the same.

Losses are in nats per token, on the same validation tokens for all runs, after
the last update. Differences are those of an arm minus its baseline.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
import statistics
from typing import Any

import numpy as np

from deltajax.comparison.plan import Arm, Comparison, Pair, PlannedRun
from deltajax.comparison.record import (
  Outcome,
  read_metrics,
  read_outcome,
  read_start,
  Start,
)
from deltajax.comparison.runner import Failure, is_finished
from deltajax.comparison.statistics import paired_statistics, PairedStatistics
from deltajax.config import ConfigError
from deltajax.training.stopping import RunStopped

SCHEMA = "deltajax.comparison"
VERSION = 1
# Of training loss over the run.
_BINS = 40


@dataclasses.dataclass(frozen=True)
class Curve:
  """A number over the updates of a run.

  Attributes:
    steps: completed updates.
    values: after each.
  """

  steps: list[int]
  values: list[float]


@dataclasses.dataclass(frozen=True)
class RunScore:
  """How one run ended.

  Attributes:
    seed: of parameters and data order.
    loss: validation loss after the last update, nats per token.
    perplexity: e to the loss.
    bits_per_byte: of the same text.
    skipped: updates that were not made.
    routing: how sharply the model routes, as in metrics.jsonl, without the
      prefix; empty where it does not.
    validation: loss over the run.
    training: loss over the run, means of bins of logged updates.
  """

  seed: int
  loss: float
  perplexity: float
  bits_per_byte: float
  skipped: int
  routing: dict[str, float]
  validation: Curve
  training: Curve


@dataclasses.dataclass(frozen=True)
class ArmResult:
  """The runs of one arm.

  Attributes:
    name: of the arm.
    variant: of its routing.
    overrides: fields in which it differs from the base.
    parameters: how many there are.
    routing_parameters: how many of them route over depth.
    mean_loss: over seeds.
    runs: one for each seed.
  """

  name: str
  variant: str
  overrides: dict[str, Any]
  parameters: int
  routing_parameters: int
  mean_loss: float
  runs: list[RunScore]

  def mean_routing(self) -> dict[str, float]:
    """The numbers of `RunScore.routing`, over seeds."""
    return {
      name: statistics.fmean(run.routing[name] for run in self.runs)
      for name in self.runs[0].routing
    }


@dataclasses.dataclass(frozen=True)
class PairResult:
  """An arm minus its baseline, seed by seed.

  Attributes:
    arm: name of the arm.
    baseline: name of what it is compared with.
    seeds: of the pairs.
    differences: of the losses, nats per token, one for each seed.
    statistics: of these.
    perplexity_change: of the mean difference, percent.
    bits_per_byte: mean difference of bits per byte.
    parameter_change: how many more parameters, percent.
    shared_parameters: how many arrays of both had the same initial values.
    training: mean difference of training losses over the run.
  """

  arm: str
  baseline: str
  seeds: list[int]
  differences: list[float]
  statistics: PairedStatistics
  perplexity_change: float
  bits_per_byte: float
  parameter_change: float
  shared_parameters: int
  training: Curve


@dataclasses.dataclass(frozen=True)
class Cost:
  """What the runs of an arm took; another machine or day gives other numbers.

  Attributes:
    arm: its name.
    tokens_per_second: median over the logged updates of all runs.
    relative_speed: to that of the baseline.
    peak_bytes: most memory at once, median over runs.
    relative_memory: to that of the baseline.
  """

  arm: str
  tokens_per_second: float
  relative_speed: float
  peak_bytes: float
  relative_memory: float


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
  """Everything that is reported.

  Attributes:
    baseline: the arm that all others are compared with.
    seeds: of the runs.
    steps: updates of each run.
    train_tokens: that a run learns from.
    validation_tokens: that are predicted to measure a loss.
    data: fingerprints of what was read.
    environments: versions and devices of the runs.
    excluded: runs that died and were left out: arm, seed, exit code.
    arms: one for each.
    pairs: one for each.
    memory_of: what `Cost.peak_bytes` counts: `device`, what the first device
      held, or `step`, what an update holds as its compiler says, where devices
      do not tell.
    costs: one for each arm.
  """

  baseline: str
  seeds: list[int]
  steps: int
  train_tokens: int
  validation_tokens: int
  data: dict[str, Any]
  environments: list[dict[str, str]]
  excluded: list[dict[str, Any]]
  arms: list[ArmResult]
  pairs: list[PairResult]
  memory_of: str
  costs: list[Cost]

  def arm(self, name: str) -> ArmResult:
    """The arm of a name."""
    return next(arm for arm in self.arms if arm.name == name)


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
      " again, --exclude-failed leaves them out of the report.\n"
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
        for name in _same_shape(first.start, second.start)
        if first.start.shared[name] != second.start.shared[name]
      ]
      if unequal:
        raise ConfigError(
          f"{first.planned} and {second.planned} began with other values of"
          f" {len(unequal)} parameters that they share, the first is"
          f" {unequal[0]}. Were they trained with other versions of JAX"
          " or deltajax?"
        )


def compare(
  comparison: Comparison,
  runs: Sequence[FinishedRun],
  failures: Sequence[Failure] = (),
) -> ComparisonResult:
  """What runs say of arms and pairs.

  Args:
    comparison: that they are the runs of.
    runs: comparable ones.
    failures: runs that were left out.

  Raises:
    ConfigError: if an arm has no run, or a pair no seed in common.
  """
  by_arm = {
    arm: [run for run in runs if run.planned.arm == arm]
    for arm in comparison.arms
  }
  for arm, own in by_arm.items():
    if not own:
      raise ConfigError(
        f"all runs of arm {arm} died; name the others with --arms."
      )
  scores = {arm: [_score(run) for run in own] for arm, own in by_arm.items()}
  base = comparison.base
  memory_of, costs = _costs(comparison.baseline, by_arm)
  environments = {str(x.start.environment): x.start.environment for x in runs}
  data = runs[0].start.data
  return ComparisonResult(
    baseline=comparison.baseline,
    seeds=list(comparison.seeds),
    steps=base.training.steps,
    train_tokens=base.training.steps
    * base.training.batch_size
    * base.data.sequence_length,
    validation_tokens=data.validation_tokens,
    data={
      "datasets": list(base.data.datasets),
      "tokenizer": base.data.tokenizer,
      "sequence_length": base.data.sequence_length,
      "train": data.train,
      "validation": data.validation,
    },
    environments=list(environments.values()),
    excluded=[
      {"arm": x.run.arm, "seed": x.run.seed, "exit_code": x.exit_code}
      for x in failures
    ],
    arms=[
      _arm_result(arm, comparison.arms[arm], own, scores[arm])
      for arm, own in by_arm.items()
    ],
    pairs=[
      _pair_result(pair, by_arm, scores) for pair in comparison.all_pairs()
    ],
    memory_of=memory_of,
    costs=costs,
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


def _same_shape(first: Start, second: Start) -> list[str]:
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


def _score(run: FinishedRun) -> RunScore:
  validation = run.outcome.validation
  last = next((x for x in reversed(run.metrics) if "validation/loss" in x), {})
  prefix = "routing/"
  return RunScore(
    seed=run.planned.seed,
    loss=validation["validation/loss"],
    perplexity=validation["validation/perplexity"],
    bits_per_byte=validation["validation/bits_per_byte"],
    skipped=run.outcome.skipped,
    routing={
      name.removeprefix(prefix): x
      for name, x in last.items()
      if name.startswith(prefix)
    },
    validation=run.logged("validation/loss"),
    training=_binned(run.logged("train/loss")),
  )


def _binned(curve: Curve) -> Curve:
  """Means of neighbours, at the last step of each bin.

  Losses that are not finite, of updates that were skipped, are taken from their
  neighbours.
  """
  values = np.asarray(curve.values)
  good = np.isfinite(values)
  values = np.interp(curve.steps, np.asarray(curve.steps)[good], values[good])
  size = -(-len(curve.steps) // _BINS) or 1
  starts = range(0, len(curve.steps), size)
  return Curve(
    [curve.steps[i : i + size][-1] for i in starts],
    [float(values[i : i + size].mean()) for i in starts],
  )


def _arm_result(
  name: str,
  overrides: Arm,
  runs: Sequence[FinishedRun],
  scores: Sequence[RunScore],
) -> ArmResult:
  start = runs[0].start
  return ArmResult(
    name=name,
    variant=runs[0].planned.config.model.routing.variant,
    overrides=dict(overrides),
    parameters=start.parameters,
    routing_parameters=start.routing_parameters,
    mean_loss=statistics.fmean(score.loss for score in scores),
    runs=list(scores),
  )


def _pair_result(
  pair: Pair,
  runs: Mapping[str, Sequence[FinishedRun]],
  scores: Mapping[str, Sequence[RunScore]],
) -> PairResult:
  one = {score.seed: score for score in scores[pair.arm]}
  other = {score.seed: score for score in scores[pair.baseline]}
  seeds = [seed for seed in one if seed in other]
  if not seeds:
    raise ConfigError(
      f"{pair.arm} and {pair.baseline} have no seed in common that is done."
    )

  def differences(value: Callable[[RunScore], float]) -> list[float]:
    return [value(one[seed]) - value(other[seed]) for seed in seeds]

  losses = differences(lambda score: score.loss)
  found = paired_statistics(losses)
  first, second = runs[pair.arm][0].start, runs[pair.baseline][0].start
  curves = [
    (one[seed].training.values, other[seed].training.values) for seed in seeds
  ]
  return PairResult(
    arm=pair.arm,
    baseline=pair.baseline,
    seeds=seeds,
    differences=losses,
    statistics=found,
    perplexity_change=100 * math.expm1(found.mean),
    bits_per_byte=statistics.fmean(differences(lambda x: x.bits_per_byte)),
    parameter_change=100 * (first.parameters / second.parameters - 1),
    shared_parameters=len(_same_shape(first, second)),
    training=Curve(
      one[seeds[0]].training.steps,
      [
        statistics.fmean(x - y for x, y in points)
        for points in zip(
          *(zip(*both, strict=True) for both in curves), strict=True
        )
      ],
    ),
  )


def _costs(
  baseline: str, runs: Mapping[str, Sequence[FinishedRun]]
) -> tuple[str, list[Cost]]:
  """What is counted as memory, and the cost of each arm."""
  speed = {
    arm: statistics.median(
      x for run in own for x in run.logged("train/tokens_per_second").values
    )
    for arm, own in runs.items()
  }
  everyone = [run for own in runs.values() for run in own]
  on_device = all(run.logged("train/peak_bytes").values for run in everyone)
  memory = {
    arm: statistics.median(
      max(run.logged("train/peak_bytes").values)
      if on_device
      else run.outcome.peak_step_bytes
      for run in own
    )
    for arm, own in runs.items()
  }
  costs = [
    Cost(
      arm=arm,
      tokens_per_second=speed[arm],
      relative_speed=speed[arm] / speed[baseline],
      peak_bytes=memory[arm],
      relative_memory=memory[arm] / memory[baseline],
    )
    for arm in runs
  ]
  return ("device" if on_device else "step"), costs
