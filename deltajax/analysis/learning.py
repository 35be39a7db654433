"""The loss of runs over their updates, as a picture.

Needs matplotlib (extra `analysis`), which is imported when something is drawn.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from deltajax.analysis.figures import check_matplotlib, Drawing, png_of
from deltajax.analysis.style import legend_below, new_figure, series_style
from deltajax.config import ConfigError

TRAINING, VALIDATION = "train/loss", "validation/loss"

# A run as `deltajax.training.metrics.read_metrics` reads it.
Metrics = Sequence[Mapping[str, float]]


def draw_losses(runs: Mapping[str, Metrics]) -> Drawing:
  """Draws training and validation loss, nats per token, over the updates.

  Args:
    runs: name -> lines of metrics.jsonl.

  Raises:
    ConfigError: if matplotlib is not installed, or a run has no loss yet.
  """
  check_matplotlib()
  for name, metrics in runs.items():
    if not _points(metrics, TRAINING) and not _points(metrics, VALIDATION):
      raise ConfigError(f"{name} has no loss yet: no update is written down.")
  return Drawing(
    kind="losses",
    name="losses.png",
    model=None,
    text="loss over the updates: training (lines) and validation (markers)",
    png=png_of(_losses, runs),
  )


def _losses(runs: Mapping[str, Metrics]) -> Any:
  figure = new_figure(7.2, 4.0 + 0.06 * len(runs))
  axes = figure.subplots()
  for i, (name, metrics) in enumerate(runs.items()):
    style = series_style(i)
    # Runs that are the same are seen one behind the other.
    behind = (len(runs) - 1 - i) / max(len(runs) / 4, 1)
    training, validation = (
      _points(metrics, field) for field in (TRAINING, VALIDATION)
    )
    if training:
      axes.plot(
        *zip(*training, strict=True),
        color=style["color"],
        linestyle=style["linestyle"],
        linewidth=0.9 + 0.4 * behind,
        label=None if validation else name,
      )
    if validation:
      axes.plot(
        *zip(*validation, strict=True),
        color=style["color"],
        marker=style["marker"],
        markersize=5.0 + 1.5 * behind,
        linewidth=1.6,
        linestyle="--",
        label=f"{name}: {validation[-1][1]:.3f}",
      )
  # The beginning, where nothing is learned yet, would hide the rest.
  points = [xy for line in axes.get_lines() for xy in line.get_xydata()]
  last = max(x for x, _ in points)
  late = [y for x, y in points if x >= 0.05 * last]
  margin = 0.06 * (max(late) - min(late)) + 1e-3
  axes.set_ylim(min(late) - margin, max(late) + margin)
  axes.set_xlabel("updates")
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_ylabel("loss, nats per token")
  axes.grid(axis="y", color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.set_title("training (lines) and validation (markers) loss")
  legend_below(figure, axes, "validation, last")
  return figure


def _points(metrics: Metrics, field: str) -> list[tuple[float, float]]:
  """Steps and values; those of updates that were skipped are not finite."""
  found = [(line["step"], line[field]) for line in metrics if field in line]
  return [(step, value) for step, value in found if math.isfinite(value)]
