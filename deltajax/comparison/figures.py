"""Pictures of a comparison.

Needs matplotlib (extra `analysis`), which is imported when something is drawn.
"""

from collections.abc import Mapping
from typing import Any

from deltajax.analysis.figures import (
  check_matplotlib as check_matplotlib,
  png_of,
)
from deltajax.analysis.style import (
  BLACK,
  BLUE,
  MARKERS,
  new_figure,
  ORANGE,
  RUN_COLOURS,
  series_style,
)
from deltajax.comparison.results import (
  common_seeds,
  ComparisonResult,
  PairResult,
)

DIFFERENCES = "differences.png"
LOSSES = "losses.png"
CURVES = "curves.png"

_GREY = "#999999"


def draw(result: ComparisonResult) -> dict[str, bytes]:
  """PNG by name of the file; without pairs there are no differences."""
  painters = {LOSSES: _losses, CURVES: _curves}
  if result.pairs:
    painters[DIFFERENCES] = _differences
  return {name: png_of(painter, result) for name, painter in painters.items()}


def _differences(result: ComparisonResult) -> Any:
  """Each pair's differences, their mean and its intervals.

  One panel for pairs with the baseline, one for all others.
  """
  main = [x for x in result.pairs if x.baseline == result.baseline]
  others = [x for x in result.pairs if x.baseline != result.baseline]
  shown = [x for x in (main, others) if x]
  heights = [len(pairs) + 1.2 for pairs in shown]
  figure = new_figure(9.0, 0.26 * sum(heights) + 1.3)
  for i, (pairs, axes) in enumerate(
    zip(
      shown,
      figure.subplots(
        len(shown), 1, sharex=True, squeeze=False, height_ratios=heights
      )[:, 0],
      strict=True,
    )
  ):
    is_main = pairs is main
    _forest(axes, pairs, named=not is_main)
    axes.set_title(
      f"against {result.baseline}" if is_main else "against each other",
      loc="left",
    )
    if i == len(shown) - 1:
      axes.set_xlabel(
        "difference of validation loss, nats per token (left of 0: better)"
      )
    if i == 0:
      figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4
      )
  return figure


def _forest(axes: Any, pairs: list[PairResult], *, named: bool) -> None:
  """Pairs from top to bottom, the lowest mean first."""
  order = sorted(pairs, key=lambda pair: pair.statistics.mean)
  for y, pair in enumerate(order):
    found = pair.statistics
    first = y == 0
    for interval, colour, width, label in (
      (found.t_interval, BLUE, 1.6, "95% t interval"),
      (found.bootstrap_interval, ORANGE, 4.0, "95% bootstrap interval"),
    ):
      if interval is not None:
        axes.plot(
          [interval.low, interval.high],
          [y, y],
          color=colour,
          linewidth=width,
          solid_capstyle="butt",
          label=label if first else None,
        )
    axes.plot(
      pair.differences,
      [y] * len(pair.differences),
      linestyle="none",
      marker="o",
      markersize=4.5,
      markerfacecolor="white",
      markeredgecolor=BLACK,
      label="seed" if first else None,
    )
    axes.plot(
      [found.mean],
      [y],
      linestyle="none",
      marker="|",
      markersize=13,
      markeredgewidth=2,
      color=BLACK,
      label="mean" if first else None,
    )
  axes.axvline(0, color=_GREY, linewidth=1, zorder=0)
  names = [
    f"{pair.arm} \N{MINUS SIGN} {pair.baseline}" if named else pair.arm
    for pair in order
  ]
  axes.set_yticks(range(len(order)), names)
  axes.set_ylim(len(order) - 0.4, -0.6)
  axes.grid(axis="x", color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)


def _losses(result: ComparisonResult) -> Any:
  """The loss of every run; runs of a seed are joined."""
  arms = sorted(result.arms, key=lambda arm: arm.mean_loss)
  figure = new_figure(0.55 * len(arms) + 2.4, 3.8)
  axes = figure.subplots()
  for i, seed in enumerate(result.seeds):
    points = [
      (x, run.loss)
      for x, arm in enumerate(arms)
      for run in arm.runs
      if run.seed == seed
    ]
    axes.plot(
      [x for x, _ in points],
      [loss for _, loss in points],
      marker=MARKERS[i % len(MARKERS)],
      color=RUN_COLOURS[i % len(RUN_COLOURS)],
      linewidth=0.8,
      markersize=5,
      label=f"seed {seed}",
    )
  axes.plot(
    range(len(arms)),
    [arm.mean_loss for arm in arms],
    linestyle="none",
    marker="_",
    markersize=16,
    markeredgewidth=2,
    color=BLACK,
    label="mean",
  )
  axes.set_xticks(
    range(len(arms)), [arm.name for arm in arms], rotation=40, ha="right"
  )
  axes.set_xlabel("arm, lowest mean first")
  axes.set_ylabel("validation loss, nats per token")
  axes.grid(axis="y", color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
  return figure


def _curves(result: ComparisonResult) -> Any:
  """Training loss, and its paired difference, over the updates."""
  figure = new_figure(9.6, 4.0)
  left, right = figure.subplots(1, 2)
  styles = _line_styles(result)
  common = common_seeds(arm.runs for arm in result.arms)
  for arm in result.arms:
    steps = arm.runs[0].training.steps
    runs = [run.training for run in arm.runs if run.seed in common]
    columns = zip(*(curve.values for curve in runs), strict=True)
    means = [sum(column) / len(column) for column in columns]
    left.plot(steps, means, label=arm.name, **styles[arm.name])
  for pair in result.pairs:
    if pair.baseline == result.baseline:
      right.plot(pair.training.steps, pair.training.values, **styles[pair.arm])
  right.axhline(0, color=_GREY, linewidth=1, zorder=0)
  left.set_ylabel("training loss, nats per token, mean over seeds")
  left.set_yscale("log")
  left.yaxis.set_major_formatter("{x:g}")
  left.yaxis.set_minor_formatter("{x:g}")
  right.set_ylabel(f"the same minus that of {result.baseline}, nats")
  for axes in (left, right):
    axes.set_xlabel("updates")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
  # The beginning, where nothing is learned yet, would hide the rest.
  late = [
    y
    for pair in result.pairs
    if pair.baseline == result.baseline
    for y in pair.training.values[len(pair.training.values) // 5 :]
  ]
  if late:
    margin = 0.1 * (max(late) - min(late)) + 1e-4
    right.set_ylim(min([0.0, *late]) - margin, max([0.0, *late]) + margin)
  figure.legend(loc="outside right upper")
  return figure


def _line_styles(result: ComparisonResult) -> Mapping[str, dict[str, Any]]:
  """A colour and dashes for each arm; the baseline is black."""
  colours = [x for x in RUN_COLOURS if x != BLACK]
  others = [arm.name for arm in result.arms if arm.name != result.baseline]
  styles = {
    name: series_style(i, colours) | {"marker": None, "linewidth": 1.3}
    for i, name in enumerate(others)
  }
  return {result.baseline: {"color": BLACK, "linewidth": 1.8}, **styles}
