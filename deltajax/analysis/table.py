"""Reads as text, for consoles."""

from collections.abc import Sequence

from deltajax.analysis.results import ReadStatistics


def routing_table(reads: Sequence[ReadStatistics]) -> str:
  """One line for each read: its largest weight beside the uniform value."""
  names = ["read", *(read.name for read in reads)]
  width = max(map(len, names)) + 1
  lines = [
    f"{'read':<{width}}{'sources':>8}{'max':>8}{'uniform':>9}  favourite"
  ]
  for read in reads:
    favourite, weight = max(
      zip(read.sources, read.weight, strict=True), key=lambda pair: pair[1]
    )
    lines.append(
      f"{read.name:<{width}}{len(read.sources):>8}"
      f"{read.max_weight:>8.3f}{read.uniform_weight:>9.3f}"
      f"  {favourite} ({weight:.3f})"
    )
  return "\n".join(lines)
