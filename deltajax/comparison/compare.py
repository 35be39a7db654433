"""What finished runs say of arms and pairs."""

from collections.abc import Callable, Collection, Mapping, Sequence
import math
import statistics

import numpy as np

from deltajax.comparison.finished import FinishedRun, same_shape
from deltajax.comparison.paired import paired_statistics
from deltajax.comparison.plan import Arm, Comparison, Pair
from deltajax.comparison.results import (
  ArmResult,
  common_seeds,
  ComparisonResult,
  Cost,
  Curve,
  PairResult,
  RunScore,
)
from deltajax.comparison.runner import Failure
from deltajax.config import ConfigError

# Of training loss over the run.
_BINS = 40


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
    ConfigError: if an arm has no run, or there is no seed that all arms have.
  """
  by_arm = {
    arm: [run for run in runs if run.planned.arm == arm]
    for arm in comparison.arms
  }
  for arm, own in by_arm.items():
    if not own:
      raise ConfigError(
        f"all runs of arm {arm} died; leave it out of the comparison, with"
        " --arms if the command has it."
      )
  scores = {arm: [_score(run) for run in own] for arm, own in by_arm.items()}
  common = common_seeds(scores.values())
  if not common:
    raise ConfigError(
      "no seed is left of which all arms are done; compare arms that have one"
      " in common, with --arms if the command has it."
    )
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
      _arm_result(arm, comparison.arms[arm], own, scores[arm], common)
      for arm, own in by_arm.items()
    ],
    pairs=[
      _pair_result(pair, by_arm, scores) for pair in comparison.all_pairs()
    ],
    memory_of=memory_of,
    costs=costs,
  )


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
  # Bins of nearly equal size: a last one of a single update would be a spike.
  number = min(_BINS, len(values))
  return Curve(
    [int(x[-1]) for x in np.array_split(curve.steps, number)],
    [float(x.mean()) for x in np.array_split(values, number)],
  )


def _arm_result(
  name: str,
  overrides: Arm,
  runs: Sequence[FinishedRun],
  scores: Sequence[RunScore],
  common: Collection[int],
) -> ArmResult:
  start = runs[0].start
  ranked = [score for score in scores if score.seed in common]
  return ArmResult(
    name=name,
    variant=runs[0].planned.config.model.routing.variant,
    overrides=dict(overrides),
    parameters=start.parameters,
    routing_parameters=start.routing_parameters,
    mean_loss=statistics.fmean(x.loss for x in ranked),
    bits_per_byte=statistics.fmean(x.bits_per_byte for x in ranked),
    routing={
      name: statistics.fmean(x.routing[name] for x in ranked)
      for name in ranked[0].routing
    },
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

  def differences(value: Callable[[RunScore], float]) -> list[float]:
    return [value(one[seed]) - value(other[seed]) for seed in seeds]

  losses = differences(lambda score: score.loss)
  found = paired_statistics(losses)
  arm, baseline = runs[pair.arm][0], runs[pair.baseline][0]
  first, second = arm.start, baseline.start
  curves = [
    (one[seed].training.values, other[seed].training.values) for seed in seeds
  ]
  return PairResult(
    arm=pair.arm,
    baseline=pair.baseline,
    seeds=seeds,
    differences=losses,
    statistics=found,
    same_optimizer=arm.planned.config.optimizer
    == baseline.planned.config.optimizer,
    perplexity_change=100 * math.expm1(found.mean),
    bits_per_byte=statistics.fmean(differences(lambda x: x.bits_per_byte)),
    parameter_change=100 * (first.parameters / second.parameters - 1),
    shared_parameters=len(same_shape(first, second)),
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
