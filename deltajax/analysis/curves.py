"""Curves over depth."""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from deltajax.analysis.results import Analysis, ReadStatistics
from deltajax.analysis.style import (
  BLACK,
  BLUE,
  depth_axis,
  GREEN,
  legend_below,
  new_figure,
  ORANGE,
  Scales,
  series_style,
  titled,
  with_choice,
)


def _place(read: ReadStatistics, num_layers: int) -> int:
  """The sublayer of a read; the final one comes after the last."""
  if read.layer is None:
    return 2 * num_layers
  return 2 * read.layer + (read.kind == "mlp")


_SERIES = (
  ("attention", "attention", "", BLUE, "o"),
  ("attention Q/K", "attention", "Q/K", BLUE, "o"),
  ("attention V", "attention", "V", GREEN, "D"),
  ("MLP", "mlp", "", ORANGE, "s"),
  ("final", "final", "", BLACK, "*"),
)


def sharpness(name: str, analysis: Analysis, scales: Scales) -> Any:
  """Largest weight and entropy over depth, with the uniform lines."""
  reads = with_choice(analysis)
  if not reads:
    return None
  depth = analysis.num_layers
  figure = new_figure(6.2, 5.2)
  top, bottom = figure.subplots(2, 1, sharex=True)
  panels = (
    (top, "max_weight", "uniform_weight", "uniform, 1/N"),
    (bottom, "entropy", "uniform_entropy", "uniform, ln N"),
  )
  for axes, value, uniform, label in panels:
    axes.plot(
      [_place(read, depth) for read in reads],
      [getattr(read, uniform) for read in reads],
      color="#555555",
      linestyle="--",
      linewidth=1.4,
      drawstyle="steps-mid",
      label=label,
    )
    for series, kind, role, colour, marker in _SERIES:
      own = [r for r in reads if (r.kind, r.role) == (kind, role)]
      if not own:
        continue
      # Beside Q/K, not on top of it.
      x = [_place(read, depth) + 0.2 * (role == "V") for read in own]
      y = np.array([getattr(read, value) for read in own])
      std = np.array([getattr(read, f"{value}_std") for read in own])
      axes.errorbar(
        x,
        y,
        yerr=std,
        color=colour,
        marker=marker,
        markersize=8 if marker == "*" else 4.5,
        linewidth=1.3,
        elinewidth=0.7,
        alpha=0.95,
        label=series,
      )
    last = "final" if reads[-1].layer is None else None
    depth_axis(axes, depth, last)
  top.set_xlabel("")
  top.set_ylabel("largest weight")
  top.set_ylim(0, min(1.02, 1.05 * scales.max_weight))
  bottom.set_ylabel("entropy, nats")
  bottom.set_ylim(0, 1.08 * scales.entropy)
  top.set_title(
    f"{titled(name, analysis)}: sharpness over depth\n"
    "mean over tokens, bars: standard deviation"
  )
  handles, labels = top.get_legend_handles_labels()
  labels = ["uniform: 1/N, ln N", *labels[1:]]
  figure.legend(handles, labels, loc="outside lower center", ncols=5)
  return figure


def divergence(analyses: Mapping[str, Analysis]) -> Any:
  """Divergence of the Q/K and V reads, for all models that have both."""
  split = {name: x for name, x in analyses.items() if x.divergences}
  if not split:
    return None
  figure = new_figure(6.2, 3.4 + 0.06 * len(split))
  axes = figure.subplots()
  highest = 0.0
  for i, (name, analysis) in enumerate(split.items()):
    layers = [x.layer for x in analysis.divergences]
    values = np.array([x.jensen_shannon for x in analysis.divergences])
    spread = [x.jensen_shannon_std for x in analysis.divergences]
    axes.errorbar(
      layers,
      values,
      yerr=spread,
      elinewidth=0.7,
      label=titled(name, analysis),
      markersize=4,
      **series_style(i),
    )
    highest = max(highest, float((values + spread).max()))
  top = math.log(2)
  if highest > 0.4 * top:
    axes.axhline(top, color="#555555", linestyle="--", linewidth=1.4)
    axes.annotate(
      "ln 2: disjoint",
      (0.01, top),
      (0, 3),
      va="bottom",
      xycoords=("axes fraction", "data"),
      textcoords="offset points",
      fontsize=8,
    )
    axes.set_ylim(0, 1.12 * top)
  else:
    axes.set_ylim(0, max(1.15 * highest, 1e-3))
  axes.set_xlabel("layer")
  axes.set_ylabel("Jensen-Shannon divergence, nats")
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(axis="y", color="#dddddd", linewidth=0.6)
  axes.set_title(
    "how far Q/K and V routes are apart (0: equal; ln 2 = 0.693: disjoint)\n"
    "mean over tokens, bars: standard deviation"
  )
  legend_below(figure, axes)
  return figure


def norms(analyses: Mapping[str, Analysis]) -> Any:
  """Sizes of stream, inputs, outputs and gradients over depth."""
  figure = new_figure(9.6, 6.6)
  (stream, inputs), (outputs, gradients) = figure.subplots(2, 2)
  handles = {}
  for i, (name, analysis) in enumerate(analyses.items()):
    # Dashes are for what kind of sublayer it is.
    style = series_style(i) | {
      "linestyle": "-",
      "linewidth": 1.3,
      "markersize": 4,
    }
    norms = analysis.norms
    (handle,) = stream.plot(norms.stream_rms, **style)
    handles[titled(name, analysis)] = handle
    first = [values[0] for values in norms.input_rms]
    series = [(inputs, first), (outputs, norms.output_rms)]
    if norms.gradient_norm is not None:
      series.append((gradients, norms.gradient_norm))
    for axes, values in series:
      for start, line in ((0, "-"), (1, "--")):
        x = range(start, len(values), 2)
        axes.plot(x, values[start::2], **style | {"linestyle": line})
    if len(norms.input_rms[0]) == 2:
      values = [both[1] for both in norms.input_rms[::2]]
      x = range(0, 2 * len(values), 2)
      inputs.plot(x, values, **style | {"linestyle": ":"})
  titles = (
    (stream, "stream p", "RMS"),
    (inputs, "read input u, before its norm", "RMS"),
    (outputs, "sublayer output v", "RMS"),
    (gradients, "gradient of the loss by output v", "norm, nats / unit of v"),
  )
  depth = max(x.num_layers for x in analyses.values())
  for axes, title, label in titles:
    axes.set_title(title)
    axes.set_ylabel(label)
    depth_axis(axes, depth, "end" if axes is stream else None)
    values = [y for line in axes.get_lines() for y in line.get_ydata()]
    if not values:
      axes.annotate("not asked for", (0.5, 0.5), xycoords="axes fraction")
    elif min(values) > 0 and max(values) > 10 * min(values):
      axes.set_yscale("log")
    else:
      axes.set_ylim(bottom=0)
  _line_legend(
    figure,
    handles,
    any(len(x.norms.input_rms[0]) == 2 for x in analyses.values()),
  )
  figure.suptitle(
    "sizes over depth, means over tokens (RMS: root mean square over channels)",
    fontsize=10,
  )
  return figure


def _line_legend(figure, handles, has_roles: bool) -> None:
  from matplotlib.lines import Line2D

  first = "attention (Q/K)" if has_roles else "attention"
  lines: dict[str, Any] = {first: "-", "MLP": "--"}
  if has_roles:
    lines["attention, V"] = ":"
  keys = [Line2D([], [], color="#555555", linestyle=x) for x in lines.values()]
  figure.legend(
    [*handles.values(), *keys],
    [*handles, *lines],
    loc="outside lower center",
    ncols=min(4, len(handles) + len(lines)),
    fontsize=8,
  )
