"""Pictures of analyses, as PNG: one a model, or one for all where they compare.

Needs matplotlib (extra `analysis`), which is imported when something is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import io
import re
from typing import Any

from deltajax.analysis import curves, maps
from deltajax.analysis.results import Analysis
from deltajax.analysis.style import Scales, STYLE, titled
from deltajax.config import ConfigError
from deltajax.extras import install
from deltajax.routing.validation import check_name

_OF_ONE = {
  "weights": maps.weights,
  "sharpness": curves.sharpness,
  "position": maps.position,
  "similarity": maps.similarity,
}
_OF_ALL = {"divergence": curves.divergence, "norms": curves.norms}
KINDS = (*_OF_ONE, *_OF_ALL)
_TEXTS = {
  "weights": "mean weight of every source in every read, and the same relative"
  " to the uniform weight 1/N",
  "sharpness": "largest weight and entropy of every read over depth, beside the"
  " values of a uniform read",
  "position": "weight by position of the token in its document",
  "similarity": "mean cosine of every two vectors, and their effective rank",
  "divergence": "Jensen-Shannon divergence between Q/K and V routes by layer",
  "norms": "root mean square of stream, read inputs and outputs, and norm of"
  " the gradient, over depth",
}


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A picture; a notebook shows it where a cell ends with it.

  Attributes:
    kind: `weights`, `sharpness`, `position`, `similarity`, `divergence`,
      `norms` or `losses`.
    name: of its file.
    model: whose it is; None for one of all.
    text: what it shows, in words.
    png: the file.
  """

  kind: str
  name: str
  model: str | None
  text: str
  png: bytes

  def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
    """For notebooks, at 100 pixels to the inch: finer than the page."""
    width = int.from_bytes(self.png[16:20])  # In the header of the file.
    return self.png, {"width": width * 100 // STYLE["figure.dpi"]}


def check_matplotlib() -> None:
  """Raises ConfigError unless matplotlib is installed."""
  if importlib.util.find_spec("matplotlib") is None:
    raise ConfigError(
      f"figures need matplotlib, which is not installed: {install('analysis')}."
    )


def draw(
  analyses: Mapping[str, Analysis], kinds: Sequence[str] = KINDS
) -> list[Drawing]:
  """Pictures of some models; scales are the same for all of them.

  Args:
    analyses: by name of the model.
    kinds: of pictures. One that there is nothing of is left out: weights of
      `standard`, divergence without roles.

  Raises:
    ConfigError: if matplotlib is not installed, or for an unknown kind.
  """
  check_matplotlib()
  for kind in kinds:
    check_name("kind of picture", kind, KINDS)
  scales = Scales.of(list(analyses.values()))
  drawings = []
  slugs = _slugs(list(analyses))
  for kind, painter in _OF_ONE.items():
    if kind not in kinds:
      continue
    for name, analysis in analyses.items():
      figure = _painted(painter, name, analysis, scales)
      if figure is not None:
        file = f"{kind}-{slugs[name]}.png"
        text = f"{titled(name, analysis)}: {_TEXTS[kind]}"
        drawings.append(Drawing(kind, file, name, text, figure))
  for kind, compare in _OF_ALL.items():
    if kind not in kinds:
      continue
    figure = _painted(compare, analyses)
    if figure is not None:
      text = _TEXTS[kind]
      drawings.append(Drawing(kind, f"{kind}.png", None, text, figure))
  return drawings


def png_of(painter: Callable[..., Any], *arguments: Any) -> bytes:
  """The file of a figure that a function paints, in the style of all."""
  png = _painted(painter, *arguments)
  assert png is not None
  return png


def _painted(painter: Callable[..., Any], *arguments: Any) -> bytes | None:
  """A PNG; None where there is nothing to paint."""
  import matplotlib

  with matplotlib.rc_context(STYLE):
    figure = painter(*arguments)
    if figure is None:
      return None
    buffer = io.BytesIO()
    # No date and no version: the same numbers give the same file.
    figure.savefig(buffer, format="png", metadata={"Software": None})
  return buffer.getvalue()


def _slugs(names: Sequence[str]) -> dict[str, str]:
  slugs = [re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("._") for name in names]
  return {
    name: slug if slug and slugs.count(slug) == 1 else f"{slug or 'model'}_{i}"
    for i, (name, slug) in enumerate(zip(names, slugs, strict=True))
  }
