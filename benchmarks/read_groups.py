"""What layers that read the depth memory in groups move, by schedule.

    python benchmarks/read_groups.py
    python benchmarks/read_groups.py --variants delta --layers 48 --groups 1 4

Vectors of D that pass between memory and chip for each read, in the mean over
the sublayers of a model. A group of g layers has 2 g reads. Its one pass over
the n slots that are stored before it moves n vectors and 2 g mixes, backward
3 n and 4 g (see `depth_attention.py`). Then each read merges its mix with the m
sources that are not stored yet, m + 2 vectors, and adds the stream where the
variant does. Backward the merge reads m sources, the mix, the gradient of its
result and m gradients, to which it adds, and writes m + 1 gradients; the
stream's is added to as well.

In training, reads run again before their gradient, whatever `remat` is: such a
read moves the forward figure twice.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import sys

import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.routing import build_schedule, RoutingConfig
from deltajax.routing.schedule import check_group
from train.cli import check_json_file, main, write_json_file


@dataclasses.dataclass(frozen=True)
class Options:
  """What is counted.

  Attributes:
    variants: with a source for every sublayer.
    layers: L.
    groups: sizes g; those that do not divide L are left out.
    json: also write the rows to this file.
  """

  variants: tuple[str, ...] = ("delta", "attnres_full")
  layers: int = 36
  groups: tuple[int, ...] = (1, 2, 3, 4, 6, 9)
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """Vectors of a read in the mean: in passes over the memory, and in merges."""

  variant: str
  layers: int
  group: int
  forward_pass: float
  forward_merge: float
  backward_pass: float
  backward_merge: float

  @property
  def forward(self) -> float:
    """All of the forward pass."""
    return self.forward_pass + self.forward_merge

  @property
  def backward(self) -> float:
    """All of the backward pass, without what is run again."""
    return self.backward_pass + self.backward_merge


def count(variant: str, layers: int, group: int) -> Row:
  """The row of a schedule."""
  routing = RoutingConfig(variant=variant)
  check_group(routing, layers, group)
  schedule = build_schedule(routing, layers)
  steps = schedule.by_layer(group)
  reads = steps.visible.size
  # All reads of a group see what was stored before it, at most.
  stored = steps.stored.max(axis=1).sum() / reads
  recent = (steps.visible - steps.stored + steps.reads_running).mean()
  stream = int(routing.row.additive)
  return Row(
    variant=variant,
    layers=layers,
    group=group,
    forward_pass=float(stored + 1),
    forward_merge=float(recent + 2 + stream),
    backward_pass=float(3 * stored + 2),
    backward_merge=float(3 * recent + 3 + 2 * stream),
  )


def rows(options: Options) -> Iterator[Row]:
  for variant in options.variants:
    for group in options.groups:
      if options.layers % group == 0:
        yield count(variant, options.layers, group)


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  print(options)
  print(
    f"{'variant':<16}{'layers':>7}{'group':>6}"
    f"{'forward':>9}{'pass':>7}{'merge':>7}"
    f"{'backward':>10}{'pass':>7}{'merge':>7}"
  )
  found = list(rows(options))
  for row in found:
    print(
      f"{row.variant:<16}{row.layers:>7}{row.group:>6}"
      f"{row.forward:>9.1f}{row.forward_pass:>7.1f}{row.forward_merge:>7.1f}"
      f"{row.backward:>10.1f}{row.backward_pass:>7.1f}{row.backward_merge:>7.1f}"
    )
  write_json_file(options.json, [dataclasses.asdict(row) for row in found])


if __name__ == "__main__":
  main(command)
