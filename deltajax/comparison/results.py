"""What a comparison finds, as named values; docs/comparison.md says the same.

Losses are in nats per token, on the same validation tokens for all runs, after
the last update. Differences are those of an arm minus its baseline.
"""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any

from deltajax.comparison.paired import PairedStatistics

SCHEMA = "deltajax.comparison"
VERSION = 1


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
    mean_loss: over the seeds of which no run of any arm died, so that arms can
      be ranked by it.
    bits_per_byte: mean over the same seeds.
    routing: mean of `RunScore.routing` over the same seeds.
    runs: one for each seed.
  """

  name: str
  variant: str
  overrides: dict[str, Any]
  parameters: int
  routing_parameters: int
  mean_loss: float
  bits_per_byte: float
  routing: dict[str, float]
  runs: list[RunScore]


def common_seeds(arms: Iterable[Sequence[RunScore]]) -> set[int]:
  """Seeds of which no run died.

  Args:
    arms: the runs of each.
  """
  return set.intersection(*({run.seed for run in runs} for runs in arms))


@dataclasses.dataclass(frozen=True)
class PairResult:
  """An arm minus its baseline, seed by seed.

  Attributes:
    arm: name of the arm.
    baseline: name of what it is compared with.
    seeds: of the pairs.
    differences: of the losses, nats per token, one for each seed.
    statistics: of these.
    same_optimizer: whether both have the same optimizer, its schedule included.
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
  same_optimizer: bool
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
    environments: versions, commits and devices of the runs.
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
