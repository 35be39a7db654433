"""Maps: read x source, read x position, vector x vector."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from deltajax.analysis.results import Analysis, ReadStatistics
from deltajax.analysis.style import (
  log_ratio,
  new_figure,
  read_label,
  Scales,
  titled,
  with_choice,
)

NOTHING = "#ececec"
_MOST_LABELS = 50
_WEIGHT_LABEL = "mean weight (square-root scale)"


def _column(read: ReadStatistics, source: str) -> str:
  """The column of a source: an open block has that of the closed one."""
  if read.open_source and source == read.sources[-1]:
    return "stream" if source.startswith("p") else source.rstrip("+")
  return source


def source_columns(reads: Sequence[ReadStatistics]) -> list[str]:
  """Sources of all reads in the order in which they come to be seen."""
  columns = dict.fromkeys(
    _column(read, source) for read in reads for source in read.sources
  )
  return sorted(columns, key=lambda column: column == "stream")


def _map(axes, values, reads, columns, **options):
  """A map with a row for each read, and as many labels as have room."""
  import matplotlib

  colours = matplotlib.colormaps[options.pop("cmap")]
  image = axes.imshow(
    values,
    cmap=colours.with_extremes(bad=NOTHING),
    aspect="auto",
    interpolation="nearest",
    **options,
  )
  rows = {row: read_label(read) for row, read in enumerate(reads)}
  title = "read, by depth"
  if len(rows) > _MOST_LABELS:
    starts: dict[str, int] = {}
    for row, read in enumerate(reads):
      layer = read.kind if read.layer is None else str(read.layer)
      starts.setdefault(layer, row)
    rows = {row: layer for layer, row in starts.items()}
    title = "read, by depth; first of each layer"
  every = -(-len(columns) // _MOST_LABELS)
  axes.set_yticks(list(rows), list(rows.values()))
  axes.set_xticks(range(0, len(columns), every), columns[::every])
  axes.tick_params(length=0, labelsize=7)
  if max(map(len, columns)) * len(columns) > 24:
    axes.tick_params(axis="x", rotation=90)
  axes.spines[:].set_visible(False)
  if axes.get_subplotspec().is_first_col():
    axes.set_ylabel(title)
  return image


def _weight_scale(largest: float) -> Any:
  """Colours by the square root: among many sources, all weights are small."""
  from matplotlib.colors import PowerNorm

  return PowerNorm(0.5, vmin=0, vmax=largest)


def _colorbar(figure, image, axes, **options) -> Any:
  """A bar that does not grow with the figure."""
  shrink = min(1.0, 4.5 / figure.get_figheight())
  return figure.colorbar(image, ax=axes, shrink=shrink, aspect=25, **options)


def _row_height(rows: int) -> float:
  return min(max(0.17 * rows, 1.6), 10.0)


def weights(name: str, analysis: Analysis, scales: Scales) -> Any:
  """Heat map read x source: the weight, and beside it over the uniform one."""
  reads = analysis.reads
  if not reads:
    return None
  columns = source_columns(reads)
  weight = np.full((len(reads), len(columns)), np.nan)
  ratio = weight.copy()
  open_cells = []
  for row, read in enumerate(reads):
    for source, value in zip(read.sources, read.weight, strict=True):
      column = columns.index(_column(read, source))
      weight[row, column] = value
      ratio[row, column] = log_ratio(value, read.uniform_weight)
    if read.open_source and read.sources[-1].endswith("+"):
      open_cells.append((columns.index(_column(read, read.sources[-1])), row))
  width = min(max(0.21 * len(columns), 1.9), 9.0)
  figure = new_figure(2 * width + 2.6, _row_height(len(reads)) + 1.4)
  left, right = figure.subplots(1, 2, sharey=True)
  norm = _weight_scale(scales.weight)
  image = _map(left, weight, reads, columns, cmap="viridis", norm=norm)
  _colorbar(figure, image, left, label=_WEIGHT_LABEL, extend="max")
  image = _map(
    right,
    ratio,
    reads,
    columns,
    cmap="PuOr_r",
    vmin=-scales.ratio,
    vmax=scales.ratio,
  )
  bar = _colorbar(
    figure,
    image,
    right,
    label="mean weight / uniform weight 1/N",
    extend="both",
  )
  ticks = np.arange(-math.floor(scales.ratio), math.floor(scales.ratio) + 1)
  bar.set_ticks(ticks, labels=[_power_of_two(int(k)) for k in ticks])
  left.set_title("weight")
  right.set_title("relative to uniform")
  for axes in (left, right):
    axes.set_xlabel("source")
    if open_cells:
      axes.scatter(
        [column + 0.36 for column, _ in open_cells],
        [row - 0.24 for _, row in open_cells],
        s=6,
        facecolor="white",
        edgecolor="black",
        linewidth=0.5,
      )
  if len(columns) <= 8 and len(reads) <= 50:
    _write_values(left, weight, scales.weight)
  title = f"{titled(name, analysis)}: what each read weighs"
  if open_cells:
    title += "   (o: block still open)"
  figure.suptitle(title, fontsize=10)
  return figure


def _write_values(axes, values, largest) -> None:
  for (row, column), value in np.ndenumerate(values):
    if not np.isnan(value):
      axes.annotate(
        f"{value:.2f}".removeprefix("0"),
        (column, row),
        xytext=(0, 0),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=5.5,
        color="black" if value > 0.4 * largest else "white",
      )


def _power_of_two(k: int) -> str:
  return "uniform" if k == 0 else f"{2**k} x" if k > 0 else f"1/{2**-k} x"


def position(name: str, analysis: Analysis, scales: Scales) -> Any:
  """Weight on chosen sources by position of the token."""
  reads = with_choice(analysis)
  if not reads:
    return None
  bins = [i for i, n in enumerate(analysis.tokens_by_position) if n]
  columns = [_bin_name(*analysis.position_bins[i]) for i in bins]
  panels = {}
  if any("e" in read.sources for read in reads):
    panels["on the embedding e"] = _by_position(
      reads,
      bins,
      lambda r, x: x[r.sources.index("e")] if "e" in r.sources else np.nan,
    )
  panels["on the newest source"] = _by_position(reads, bins, lambda r, x: x[-1])
  panels["largest weight"] = np.array(
    [[read.max_weight_by_position[i] for i in bins] for read in reads], float
  )
  width = min(max(0.2 * len(bins), 1.7), 4.0)
  figure = new_figure(len(panels) * width + 1.9, _row_height(len(reads)) + 1.5)
  grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for axes, (title, values) in zip(grid, panels.items(), strict=True):
    norm = _weight_scale(scales.weight_at_position)
    image = _map(axes, values, reads, columns, cmap="viridis", norm=norm)
    axes.tick_params(axis="x", rotation=90)
    axes.set_title(title)
    axes.set_xlabel("position in document")
  _colorbar(figure, image, list(grid), label=_WEIGHT_LABEL)
  figure.suptitle(
    f"{titled(name, analysis)}: weight by token position", fontsize=10
  )
  return figure


def _by_position(reads, bins, choose) -> np.ndarray:
  return np.array(
    [[choose(read, read.weight_by_position[i]) for i in bins] for read in reads]
  )


def _bin_name(first: int, last: int) -> str:
  return str(first) if first == last else f"{first}-{last}"


_FAMILIES = {
  "deltas": "deltas (e, outputs v)",
  "block_deltas": "block deltas (e, b)",
  "released": "released recurrence",
  "cumulative": "cumulative streams p",
}


def similarity(name: str, analysis: Analysis, scales: Scales) -> Any:
  """Mean cosines of every two vectors, a matrix for each family."""
  families = {x.family: x for x in analysis.similarities}
  found = [families[family] for family in _FAMILIES if family in families]
  figure = new_figure(2.5 * len(found) + 0.9, 3.4)
  grid = figure.subplots(1, len(found), squeeze=False)[0]
  for axes, similarity in zip(grid, found, strict=True):
    names = similarity.vectors
    every = -(-len(names) // 20)
    image = axes.imshow(
      similarity.cosine, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
    )
    ticks = range(0, len(names), every)
    axes.set_xticks(ticks, names[::every], rotation=90)
    axes.set_yticks(ticks, names[::every])
    axes.tick_params(length=0, labelsize=6.5)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("vector")
    axes.set_title(
      f"{_FAMILIES[similarity.family]}\neffective rank"
      f" {similarity.effective_rank:.1f} of {len(names)}\n"
      f"mean cosine {round(similarity.mean_cosine, 2) + 0.0:.2f}",
      fontsize=8,
    )
  grid[0].set_ylabel("vector")
  figure.colorbar(image, ax=list(grid), label="mean cosine", shrink=0.75)
  figure.suptitle(
    f"{titled(name, analysis)}: similarity of vectors over depth",
    fontsize=10,
  )
  return figure
