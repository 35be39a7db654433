"""Reads as text, for consoles."""

from collections.abc import Mapping, Sequence

from deltajax.analysis.results import Analysis, ReadStatistics


def routing_table(reads: Sequence[ReadStatistics]) -> str:
  """One line for each read: its largest weight beside the uniform value."""
  names = ["read", *(read.name for read in reads)]
  width = max(map(len, names)) + 1
  lines = [
    f"{'read':<{width}}{'sources':>8}{'max':>8}{'uniform':>9}  favourite"
  ]
  for read in reads:
    lines.append(
      f"{read.name:<{width}}{len(read.sources):>8}"
      f"{read.max_weight:>8.3f}{read.uniform_weight:>9.3f}"
      f"  {read.favourite} ({max(read.weight):.3f})"
    )
  return "\n".join(lines)


def totals_table(analyses: Mapping[str, Analysis]) -> str:
  """One line for each model: how sharp its reads are, beside uniform ones.

  Args:
    analyses: by name of the model.
  """
  width = max(map(len, ["model", *analyses])) + 1
  lines = [
    f"{'model':<{width}}{'loss':>8}{'reads':>7}{'max':>8}{'uniform':>9}"
    f"{'entropy':>9}{'uniform':>9}  effective sources"
  ]
  for name, analysis in analyses.items():
    line = f"{name:<{width}}{analysis.loss:>8.4f}"
    totals = analysis.totals
    if totals is not None:
      line += (
        f"{totals.reads:>7}{totals.max_weight:>8.3f}"
        f"{totals.uniform_weight:>9.3f}{totals.entropy:>9.3f}"
        f"{totals.uniform_entropy:>9.3f}"
        f"  {totals.effective_sources:.2f} of {totals.sources:.2f}"
      )
    lines.append(line)
  return "\n".join(lines)
