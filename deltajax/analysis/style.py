"""What all pictures of analyses share: colours, scales, axes.

Colours can be told apart with any colour vision: Okabe and Ito's for lines,
viridis and the diverging PuOr and RdBu for maps.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from deltajax.analysis.results import Analysis, ReadStatistics

BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
RUN_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", "#E69F00", BLACK)
MARKERS = "osD^vPX"
DASHES = ("solid", "dashed", "dotted", "dashdot")

STYLE: dict[Any, Any] = {
  "font.size": 9,
  "axes.titlesize": 10,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "figure.dpi": 140,
  "savefig.facecolor": "white",
  "legend.frameon": False,
}


@dataclasses.dataclass(frozen=True)
class Scales:
  """Limits that all models share.

  Attributes:
    weight: largest mean weight of a source, where there is a choice.
    ratio: largest log2 of a mean weight over the uniform one, either way.
    entropy: largest possible entropy, nats.
    max_weight: largest mean of the largest weight, with its spread.
    weight_at_position: largest mean of the largest weight at some position.
  """

  weight: float
  ratio: float
  entropy: float
  max_weight: float
  weight_at_position: float

  @classmethod
  def of(cls, analyses: Sequence[Analysis]) -> "Scales":
    """The limits that hold all of these."""
    reads = [read for x in analyses for read in with_choice(x)]
    weights = [(w, read.uniform_weight) for read in reads for w in read.weight]
    return cls(
      weight=max((w for w, _ in weights), default=1.0),
      # Less than 1/8 of uniform, or more than 8 times, looks the same.
      ratio=min(max([1.0, *(abs(log_ratio(*x)) for x in weights)]), 3.0),
      entropy=max((read.uniform_entropy for read in reads), default=1.0),
      max_weight=max(
        (r.max_weight + r.max_weight_std for r in reads), default=1.0
      ),
      weight_at_position=max(
        (x for r in reads for x in r.max_weight_by_position if x is not None),
        default=1.0,
      ),
    )


def with_choice(analysis: Analysis) -> list[ReadStatistics]:
  """The reads with more than one source."""
  return [read for read in analysis.reads if len(read.sources) > 1]


def log_ratio(weight: float, uniform: float) -> float:
  """How many times the uniform weight, as a power of two."""
  return math.log2(max(weight, 1e-9) / uniform)


def new_figure(width: float, height: float) -> Any:
  """An empty figure; sizes in inches."""
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout="constrained")


def series_style(
  i: int, colours: Sequence[str] = RUN_COLOURS
) -> dict[str, Any]:
  """How the line of the i-th of several models looks.

  Colour and marker are enough to tell it from 48 others, colour and dashes from
  27, so that a picture may use either for something else. Of 6 colours, 41 and
  23.

  Args:
    i: from 0.
    colours: that it may have.
  """
  turn, place = divmod(i, len(colours))
  return {
    "color": colours[place],
    "marker": MARKERS[(place + turn) % len(MARKERS)],
    "linestyle": DASHES[turn % len(DASHES)],
  }


def legend_below(figure: Any, axes: Any, title: str | None = None) -> None:
  """A legend that covers no curve, however many there are."""
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(3, len(labels)),
    fontsize=8,
    title=title,
  )


def read_label(read: ReadStatistics) -> str:
  """A short name for an axis: layer, kind, role."""
  if read.layer is None:
    return read.kind
  kind = {"attention": "attn", "mlp": "MLP"}[read.kind]
  return f"{read.layer} {kind} {read.role}".strip()


def titled(name: str, analysis: Analysis) -> str:
  """A model's name, and its variant if the name does not say it."""
  variant = analysis.variant
  return name if name == variant else f"{name} ({variant})"


def depth_axis(axes: Any, num_layers: int, last: str | None = None) -> None:
  """Sublayers along x, with the layers as ticks.

  Args:
    axes: of the curves.
    num_layers: L.
    last: what comes after the last sublayer, if anything.
  """
  every = -(-num_layers // 16)
  layers = range(0, num_layers, every)
  ticks, names = [2 * layer for layer in layers], [str(x) for x in layers]
  if last is not None:
    ticks, names = [*ticks, 2 * num_layers], [*names, last]
  axes.set_xticks(ticks, names)
  axes.set_xlim(-0.7, 2 * num_layers + (-0.3 if last is None else 0.7))
  axes.set_xlabel("layer")
  axes.grid(axis="y", color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
