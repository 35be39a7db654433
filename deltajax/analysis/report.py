"""What an analysis leaves behind: routing.json, figures, and a report.

The report is one HTML file with its pictures inside, and refers to nothing.
"""

import base64
from collections.abc import Mapping, Sequence
import dataclasses
import html
import json
import pathlib
from typing import Any

from deltajax.analysis.figures import Drawing
from deltajax.analysis.results import Analysis, SCHEMA, VERSION
from deltajax.checkpoints.directory import check_replaceable, replaced_directory

JSON_NAME = "routing.json"
REPORT_NAME = "report.html"
FIGURES = "figures"
_WHAT = "an analysis"
# In the title of a report.
_MOST_NAMES = 4


@dataclasses.dataclass(frozen=True)
class AnalysedModel:
  """A model as the report names it.

  Attributes:
    name: unlike the others'.
    source: where it was found.
    config: of the model, as plain values.
    analysis: what was found.
  """

  name: str
  source: str
  config: Mapping[str, Any]
  analysis: Analysis


def check_output(directory: pathlib.Path) -> None:
  """Raises ConfigError unless `write_report` could write there."""
  check_replaceable(directory, _is_ours, _WHAT)


def write_report(
  directory: pathlib.Path,
  data: Mapping[str, Any],
  subjects: Sequence[AnalysedModel],
  drawings: Sequence[Drawing],
) -> None:
  """Writes all files at once, or none.

  Args:
    directory: a new one, an empty one, or that of an earlier analysis, which
      is replaced.
    data: what all models were run on.
    subjects: the models.
    drawings: pictures of them.
  """
  values = routing_json(data, subjects)
  with replaced_directory(directory, _is_ours, _WHAT) as temporary:
    text = json.dumps(values, indent=1, allow_nan=False)
    (temporary / JSON_NAME).write_text(text + "\n")
    (temporary / FIGURES).mkdir()
    for drawing in drawings:
      (temporary / FIGURES / drawing.name).write_bytes(drawing.png)
    page = report_page(data, subjects, drawings)
    (temporary / REPORT_NAME).write_text(page, encoding="utf-8")


def routing_json(
  data: Mapping[str, Any], subjects: Sequence[AnalysedModel]
) -> dict[str, Any]:
  """What `routing.json` holds; see docs/analysis.md."""
  return {
    "schema": SCHEMA,
    "version": VERSION,
    "data": dict(data),
    "models": [dataclasses.asdict(subject) for subject in subjects],
  }


def _is_ours(path: pathlib.Path) -> bool:
  """Whether a file is part of an analysis that was written here before."""
  if path.name not in (JSON_NAME, REPORT_NAME, FIGURES):
    return False
  try:
    values = json.loads((path.parent / JSON_NAME).read_text())
  except (OSError, ValueError):
    return False
  return isinstance(values, dict) and values.get("schema") == SCHEMA


def report_page(
  data: Mapping[str, Any],
  subjects: Sequence[AnalysedModel],
  drawings: Sequence[Drawing],
) -> str:
  """The report as HTML, models side by side."""
  names = ", ".join(subject.name for subject in subjects)
  if len(subjects) > _MOST_NAMES:
    names = f"{len(subjects)} models"
  facts = "; ".join(
    f"{key.replace('_', ' ')} {_shown(value)}" for key, value in data.items()
  )
  sources = [
    f"{subject.name}: {subject.source}, {subject.analysis.tokens:,} tokens"
    for subject in subjects
  ]
  of_note: dict[str, list[str]] = {}
  for subject in subjects:
    for note in subject.analysis.notes:
      of_note.setdefault(note, []).append(subject.name)
  notes = [
    f"<li><b>{_text(', '.join(found))}</b>: {_text(note)}</li>"
    for note, found in of_note.items()
  ]
  parts = [
    f"<h1>Routing of {_text(names)}</h1>",
    f"<p class=facts>Data: {_text(facts)}.</p>",
    "<details class=facts><summary>Where the models come from</summary>"
    f"<ul>{''.join(f'<li>{_text(x)}</li>' for x in sources)}</ul></details>",
    "<h2>At a glance</h2>",
    _totals_table(subjects),
    "<p>Means over tokens, heads and all sublayers that see more than one"
    " source; the reads of one sublayer share its weight. A largest weight is"
    " sharp only relative to the uniform one, which stands beside it. JSD:"
    " Jensen-Shannon divergence of Q/K and V routes, at most"
    " ln&nbsp;2&nbsp;=&nbsp;0.693 nats.</p>",
    f"<ul>{''.join(notes)}</ul>" if notes else "",
  ]
  for kind, title in _SECTIONS.items():
    own = [drawing for drawing in drawings if drawing.kind == kind]
    if own:
      figures = "".join(map(_figure, own))
      parts.append(f"<h2>{_text(title)}</h2><div class=side>{figures}</div>")
  parts.append("<h2>Reads</h2>")
  parts += [_reads_table(subject) for subject in subjects]
  body = "\n".join(parts)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>Routing of {_text(names)}</title>\n<style>{_CSS}</style>\n"
    f"</head>\n<body>\n{body}\n</body>\n</html>\n"
  )


def _figure(drawing: Drawing) -> str:
  encoded = base64.b64encode(drawing.png).decode()
  text = _text(drawing.text)
  return (
    f'<figure><img alt="{text}" src="data:image/png;base64,{encoded}">'
    f"<figcaption>{text}</figcaption></figure>"
  )


def _totals_table(subjects: Sequence[AnalysedModel]) -> str:
  head = (
    *("model", "variant", "loss, nats", "reads"),
    *("largest weight (uniform)", "entropy, nats (uniform)"),
    *("effective sources", "JSD, nats", "rank of deltas", "rank of streams"),
  )
  rows = []
  for subject in subjects:
    found, totals = subject.analysis, subject.analysis.totals
    ranks = {
      x.family: f"{x.effective_rank:.1f} of {len(x.vectors)}"
      for x in found.similarities
    }
    numbers = ["-"] * 5
    if totals is not None:
      divergence = totals.jensen_shannon
      numbers = [
        str(totals.reads),
        f"{totals.max_weight:.3f} ({totals.uniform_weight:.3f})",
        f"{totals.entropy:.3f} ({totals.uniform_entropy:.3f})",
        f"{totals.effective_sources:.2f} of {totals.sources:.2f}",
        "-" if divergence is None else f"{divergence:.3f}",
      ]
    rows.append(
      [
        subject.name,
        found.variant,
        f"{found.loss:.4f}",
        *numbers,
        ranks["deltas"],
        ranks["cumulative"],
      ]
    )
  return _table(head, rows)


def _reads_table(subject: AnalysedModel) -> str:
  if not subject.analysis.reads:
    return f"<p>{_text(subject.name)}: no reads.</p>"
  head = (
    *("read", "sources", "largest weight", "uniform", "entropy, nats"),
    *("uniform", "effective sources", "favourite"),
  )
  rows = []
  for read in subject.analysis.reads:
    rows.append(
      [
        read.name,
        str(len(read.sources)),
        f"{read.max_weight:.3f} ± {read.max_weight_std:.3f}",
        f"{read.uniform_weight:.3f}",
        f"{read.entropy:.3f} ± {read.entropy_std:.3f}",
        f"{read.uniform_entropy:.3f}",
        f"{read.effective_sources:.2f}",
        f"{read.favourite} ({max(read.weight):.3f})",
      ]
    )
  return (
    f"<details><summary>{_text(subject.name)}: {len(rows)} reads, by depth"
    f"</summary>{_table(head, rows)}</details>"
  )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  def row(cells, tag):
    return "<tr>" + "".join(f"<{tag}>{_text(x)}</{tag}>" for x in cells)

  lines = [row(head, "th"), *(row(cells, "td") for cells in rows)]
  return f"<div class=wide><table>{'</tr>'.join(lines)}</tr></table></div>"


def _shown(value: Any) -> str:
  text = str(value)
  return text[:12] if len(text) == 64 and text.isalnum() else text


def _text(text: str) -> str:
  return html.escape(text, quote=True)


_SECTIONS = {
  "weights": "What each read weighs",
  "sharpness": "Sharpness over depth",
  "divergence": "Q/K and V routes",
  "position": "Weight by token position",
  "similarity": "Similarity of vectors over depth",
  "norms": "Norms over depth",
}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto;
  max-width: 1500px; padding: 0 1.5rem; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.facts, figcaption { color: #555; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid
  #ddd; }
td { white-space: nowrap; } th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.side { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
figure { margin: 0; flex: 0 1 auto; max-width: 100%; }
.side figure:not(:only-child) { max-width: calc(50% - .75rem); }
img { max-width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; margin-top: .3rem; }
@media (max-width: 900px) {
  .side figure:not(:only-child) { max-width: 100%; } }
"""
