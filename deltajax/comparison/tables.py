"""A comparison as Markdown tables."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from deltajax.comparison.paired import Interval
from deltajax.comparison.results import (
  ArmResult,
  ComparisonResult,
  Cost,
  PairResult,
)

COST_HEADING = "## Cost"


def markdown(result: ComparisonResult) -> str:
  """The whole report; what depends on the machine comes last."""
  parts = [
    "# Comparison",
    facts(result),
    "## Paired differences",
    "Validation loss of an arm minus that of what it is compared with, nats per"
    " token: below 0, the arm is better. Intervals are 95% intervals of the"
    " mean over seeds; docs/comparison.md says what they mean.",
    differences_table(result),
    "## Arms",
    arms_table(result),
  ]
  routing = [(arm.name, arm.mean_routing()) for arm in result.arms]
  routing = [(name, values) for name, values in routing if values]
  if routing:
    parts += [
      "## Routing",
      "Mean largest weight of a read and its entropy in nats, each beside that"
      " of a uniform read, at the end of the runs, on the first rows.",
      routing_table(routing),
    ]
  parts += ["## What the arms change", changes_table(result)]
  return "\n\n".join([*parts, COST_HEADING, cost_text(result)]) + "\n"


def differences_table(result: ComparisonResult) -> str:
  """One row for each pair, the lowest difference of each baseline first."""
  order = list(dict.fromkeys(pair.baseline for pair in result.pairs))
  pairs = sorted(
    result.pairs, key=lambda x: (order.index(x.baseline), x.statistics.mean)
  )
  head = (
    *("arm", "minus", "difference", "t interval", "bootstrap interval"),
    *("signs -/+", "p (t)", "perplexity", "bits per byte"),
  )
  return table(head, [_pair_row(pair) for pair in pairs], text_columns=2)


def _pair_row(pair: PairResult) -> list[str]:
  found = pair.statistics
  return [
    pair.arm,
    pair.baseline,
    f"{found.mean:+.4f}",
    _interval(found.t_interval),
    _interval(found.bootstrap_interval),
    f"{found.below}/{found.above}",
    _p_value(found.p_value),
    f"{pair.perplexity_change:+.2f}%",
    f"{pair.bits_per_byte:+.4f}",
  ]


def arms_table(result: ComparisonResult) -> str:
  """One row for each arm, the lowest mean loss first."""
  seeds = [f"seed {seed}" for seed in result.seeds]
  head = (
    *("arm", "mean loss", *seeds, "bits per byte", "parameters"),
    *("of them routing", "skipped updates"),
  )
  arms = sorted(result.arms, key=lambda arm: arm.mean_loss)
  return table(head, [_arm_row(arm, result.seeds) for arm in arms])


def _arm_row(arm: ArmResult, seeds: Sequence[int]) -> list[str]:
  losses = {run.seed: f"{run.loss:.4f}" for run in arm.runs}
  bits = statistics.fmean(run.bits_per_byte for run in arm.runs)
  share = arm.routing_parameters / arm.parameters
  return [
    arm.name,
    f"{arm.mean_loss:.4f}",
    *(losses.get(seed, "died") for seed in seeds),
    f"{bits:.4f}",
    f"{arm.parameters:,}",
    f"{arm.routing_parameters:,} ({share:.3%})",
    str(sum(run.skipped for run in arm.runs)),
  ]


def routing_table(
  rows: Sequence[tuple[str, Mapping[str, float | None]]],
) -> str:
  """How sharply models route, each number beside that of a uniform read.

  Args:
    rows: name of a model, and its numbers as in `totals` of an analysis.
  """
  head = (
    *("arm", "largest weight", "uniform", "entropy", "uniform"),
    *("effective sources", "sources", "Q/K against V, nats"),
  )
  names = (
    *("max_weight", "uniform_weight", "entropy", "uniform_entropy"),
    *("effective_sources", "sources", "jensen_shannon"),
  )

  def shown(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"

  return table(
    head,
    [
      [model, *(shown(values.get(name)) for name in names)]
      for model, values in rows
    ],
  )


def changes_table(result: ComparisonResult) -> str:
  """Fields in which arms differ from what they share, schedules included."""
  rows = [
    [
      arm.name,
      "; ".join(f"`{name}` {_plain(x)}" for name, x in arm.overrides.items())
      or "nothing",
    ]
    for arm in result.arms
  ]
  return table(("arm", "sets"), rows, text_columns=2)


def cost_table(result: ComparisonResult) -> str:
  """One row for each arm."""
  head = ("arm", "tokens/s", "relative", "memory, MiB", "relative")
  return table(head, [_cost_row(cost) for cost in result.costs])


def _cost_row(cost: Cost) -> list[str]:
  return [
    cost.arm,
    f"{cost.tokens_per_second:.0f}",
    f"{cost.relative_speed:.2f}",
    f"{cost.peak_bytes / 2**20:.1f}",
    f"{cost.relative_memory:.2f}",
  ]


def table(
  head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> str:
  """A Markdown table: columns of text, then numbers."""
  numbers = len(head) - text_columns
  lines = [head, ["---"] * text_columns + ["---:"] * numbers, *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(result: ComparisonResult) -> str:
  """What was compared on what, and what was left out."""
  text = (
    f"Baseline: {result.baseline}. Seeds:"
    f" {', '.join(map(str, result.seeds))}; arms of a seed have the same data"
    " in the same order and the same initial values of all parameters that they"
    f" share, which was checked. {result.steps:,} updates,"
    f" {result.train_tokens:,} training tokens; losses are those after the last"
    f" update, on the same {result.validation_tokens:,} validation tokens."
  )
  if result.excluded:
    left_out = ", ".join(
      f"{x['arm']} seed {x['seed']} (exit code {x['exit_code']})"
      for x in result.excluded
    )
    text += f"\n\n**Left out, because they died: {left_out}.**"
  if len(result.environments) > 1:
    text += (
      "\n\n**Runs were made in unequal environments:"
      f" {'; '.join(map(_environment, result.environments))}.**"
    )
  return text


def cost_text(result: ComparisonResult) -> str:
  """Speed and memory, and of what."""
  what = {
    "device": "of the first device",
    "step": "of an update, as its compiler says",
  }[result.memory_of]
  return (
    f"Relative to {result.baseline}. Median tokens/s; peak memory {what}."
    f" {environment(result)}.\n\n{cost_table(result)}"
  )


def environment(result: ComparisonResult) -> str:
  """The machine and the versions of the first run."""
  return _environment(result.environments[0])


def _environment(values: dict[str, str]) -> str:
  return (
    f"{values['devices']} x {values['device']} ({values['machine']},"
    f" {values['cpus']} CPUs), Python {values['python']}, JAX {values['jax']}"
  )


def _p_value(value: float | None) -> str:
  if value is None:
    return "-"
  return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _interval(interval: Interval | None) -> str:
  if interval is None:
    return "-"
  return f"{interval.low:+.4f} to {interval.high:+.4f}"


def _plain(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)
