"""What a comparison leaves behind: comparison.json, comparison.md, figures."""

import dataclasses
import json
import pathlib

from deltajax.comparison import figures, tables
from deltajax.comparison.plan import Comparison
from deltajax.comparison.results import ComparisonResult, SCHEMA, VERSION
from deltajax.config import ConfigError, to_dict
from deltajax.files import temporary_of, write_file

JSON_NAME = "comparison.json"
MARKDOWN_NAME = "comparison.md"
FIGURES = "figures"
_OURS = (JSON_NAME, MARKDOWN_NAME, FIGURES, "runs", "logs", "compiled")


def check_output(out: pathlib.Path) -> None:
  """Raises ConfigError unless a directory is new or that of a comparison."""
  if out.exists() and not out.is_dir():
    raise ConfigError(f"--out {out} is a file, not a directory.")
  ours = {*_OURS, *(temporary_of(out / x).name for x in _OURS)}
  others = sorted(x.name for x in out.glob("*") if x.name not in ours)
  if others:
    raise ConfigError(
      f"--out {out} holds {others[0]!r}, which is no part of a comparison; name"
      " an empty or new directory."
    )


def write_report(
  out: pathlib.Path, comparison: Comparison, result: ComparisonResult
) -> None:
  """Writes all files, each at once or not at all.

  Args:
    out: directory of the comparison.
    comparison: what was asked.
    result: what was found.
  """
  values = {
    "schema": SCHEMA,
    "version": VERSION,
    "config": to_dict(comparison.base),
    **dataclasses.asdict(result),
  }
  text = json.dumps(values, indent=1, allow_nan=False) + "\n"
  (out / FIGURES).mkdir(parents=True, exist_ok=True)
  for name, png in figures.draw(result).items():
    write_file(out / FIGURES / name, png)
  write_file(out / MARKDOWN_NAME, tables.markdown(result))
  write_file(out / JSON_NAME, text)


def summary(result: ComparisonResult) -> str:
  """The differences in a few lines, for the console."""
  lines = []
  for pair in sorted(result.pairs, key=lambda x: x.statistics.mean):
    interval = pair.statistics.t_interval
    between = (
      ""
      if interval is None
      else f" [{interval.low:+.4f}, {interval.high:+.4f}]"
    )
    lines.append(
      f"{pair.arm} - {pair.baseline}: {pair.statistics.mean:+.4f}{between}"
      f" nats, {pair.statistics.below} of {len(pair.seeds)} below 0"
    )
  return "\n".join(lines)
