"""A comparison as Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from deltajax.comparison.paired import Interval
from deltajax.comparison.results import (
  ArmResult,
  ComparisonResult,
  Cost,
  PairResult,
)

COST_HEADING = "## Cost"
_OTHER_OPTIMIZER = "†"
SHARPNESS = (
  "Largest weight of a read and its entropy in nats, each beside that of a"
  " uniform read: means over the sublayers that see more than one source."
)


def markdown(result: ComparisonResult) -> str:
  """The whole report; what depends on the machine comes last."""
  parts = [
    "# Comparison",
    facts(result),
    "## Paired differences",
    differences_text(result),
    "## Arms",
    arms_table(result),
  ]
  routing = [(arm.name, arm.routing) for arm in result.arms if arm.routing]
  if routing:
    parts += [
      "## Routing",
      f"{SHARPNESS} At the end of the runs, on the first validation row (of"
      " each device, where there are several).",
      routing_table(routing),
    ]
  parts += ["## What the arms change", changes_table(result)]
  return "\n\n".join([*parts, COST_HEADING, cost_text(result)]) + "\n"


def differences_text(result: ComparisonResult) -> str:
  """The paired differences, and how to read them."""
  text = (
    "Validation loss of an arm minus that of what it is compared with, nats per"
    " token: below 0, the arm is better. Intervals are 95% intervals of the"
    " mean over seeds"
  )
  seeds = len(result.seeds)
  if 1 < seeds < 10:
    text += (
      f"; with {seeds} seeds the t interval is the one to believe, and the"
      " bootstrap's is too narrow"
    )
  pairs = len(result.pairs)
  text += (
    f". They are not corrected for the number of pairs: of {pairs} pairs"
    f" without any difference, {0.05 * pairs:.1f} intervals leave out 0 on"
    " average."
  )
  if not all(pair.same_optimizer for pair in result.pairs):
    text += (
      f" Arms marked {_OTHER_OPTIMIZER} were trained with another optimizer or"
      " schedule than what they are compared with."
    )
  return f"{text}\n\n{differences_table(result)}"


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
    pair.arm + ("" if pair.same_optimizer else f" {_OTHER_OPTIMIZER}"),
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
  share = arm.routing_parameters / arm.parameters
  return [
    arm.name,
    f"{arm.mean_loss:.4f}",
    *(losses.get(seed, "died") for seed in seeds),
    f"{arm.bits_per_byte:.4f}",
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
    " share and that do not route over depth, which was checked."
    f" {result.steps:,} updates,"
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
      f"\n\n**Runs were made in {len(result.environments)} unequal"
      f" environments: {_unequal(result.environments)}.**"
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
  values = result.environments[0]
  code = values["deltajax"]
  if "commit" in values:
    changed = ", changed" if values.get("changed") == "True" else ""
    code += f" (commit {values['commit'][:12]}{changed})"
  return (
    f"{values['devices']} ({values['machine']}, {values['cpus']} CPUs), Python"
    f" {values['python']}, JAX {values['jax']}, deltajax {code}"
  )


def _unequal(environments: Sequence[Mapping[str, str]]) -> str:
  """What environments differ in."""
  names = dict.fromkeys(name for x in environments for name in x)
  values = {name: [x.get(name, "none") for x in environments] for name in names}
  return "; ".join(
    f"{name} {', '.join(dict.fromkeys(found))}"
    for name, found in values.items()
    if len(set(found)) > 1
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
