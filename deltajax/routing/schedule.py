"""From a row of the table and a depth to integer tables: routing as data.

Pure NumPy, so that every variant can be read and tested without JAX. Sublayers
are numbered 0 <= s < 2 * num_layers, attention even and MLP odd.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from deltajax.routing.validation import ConfigError
from deltajax.routing.variants import RoutingConfig


class Step(NamedTuple):
  """One row of the schedule: what one sublayer (or the final read) does.

  Scalars, or arrays with leading axes where rows are stacked, of NumPy or JAX;
  a tuple, so that a scan can slice it.

  Attributes:
    visible: int32, how many slots of the memory are read.
    stored: int32, how many of these have been stored when the transformer
      layer (or the group of layers that reads together) begins; the others are
      its own, `DepthState.recent`.
    reads_running: bool, whether the running source is read too.
    slot: int32, the slot that is written if the block closes.
    closes: bool, whether the block closes after this sublayer: a slot is
      appended and the running delta starts again at zero.

  Examples:
    >>> step = build_schedule(RoutingConfig(variant="delta"), 2).step(3)
    >>> int(step.visible), int(step.stored), bool(step.reads_running)
    (4, 3, False)
  """

  visible: Any
  stored: Any
  reads_running: Any
  slot: Any
  closes: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The routing of a whole model.

  Attributes:
    num_slots: slots S of the memory at the end of the model.
    needs_stream: whether sublayers read the stream or store it; if not, they
      read what sublayers put out, and the stream is carried for nothing.
    steps: a Step of arrays [2 * num_layers].
    final: the Step of the final read, or None if the variant has none.
    slot_names: what each slot holds, for tables and figures: `e`, `v3` (the
      output of sublayer 3), `b2` (what block 2 added), `p3` (the stream
      before sublayer 3), `r2` (released recurrence).
    running_names: per sublayer, and last for the final read, the name of the
      running source, for example `b2+` while block 2 is open.

  Examples:
    >>> routing = RoutingConfig(variant="delta_block", num_blocks=2)
    >>> schedule = build_schedule(routing, num_layers=4)
    >>> schedule.slot_names
    ('e', 'b1')
    >>> schedule.sources(7)
    ['e', 'b1', 'b2+']
  """

  num_slots: int
  needs_stream: bool
  steps: Step
  final: Step | None
  slot_names: tuple[str, ...]
  running_names: tuple[str, ...]

  @property
  def num_sublayers(self) -> int:
    """2L: an attention and an MLP for each layer."""
    return len(self.steps.visible)

  def step(self, sublayer: int) -> Step:
    """The row of one sublayer, as NumPy scalars."""
    return Step(*(x[sublayer] for x in self.steps))

  def by_layer(self, group: int = 1) -> Step:
    """Rows grouped by transformer layer, or by several that read together.

    Args:
      group: layers in a group; divides num_layers.

    Returns:
      Arrays [num_layers / group, 2 * group].
    """
    visible, closes = self.steps.visible, self.steps.closes
    first_slot = self.num_slots - int(closes.sum())
    stored = _stored(visible, _appended(first_slot, closes), group)
    steps = self.steps._replace(stored=stored)
    return Step(*(x.reshape(-1, 2 * group) for x in steps))

  def sources(self, sublayer: int | None) -> list[str]:
    """Names of the sources that a sublayer reads; None: the final read."""
    step = self.final if sublayer is None else self.step(sublayer)
    if step is None:
      return []
    names = list(self.slot_names[: step.visible])
    if step.reads_running:
      names.append(self.running_names[-1 if sublayer is None else sublayer])
    return names


def build_schedule(routing: RoutingConfig, num_layers: int) -> Schedule:
  """Returns the schedule of a routing config at a depth.

  Args:
    routing: the variant and its options.
    num_layers: transformer layers L; the schedule has 2L sublayers.

  Returns:
    Integer and boolean NumPy tables [2L]; nothing is computed with JAX.

  Raises:
    ConfigError: if there are fewer layers than blocks, or no layers.

  Examples:
    >>> schedule = build_schedule(RoutingConfig(variant="delta"), num_layers=2)
    >>> schedule.steps.visible.tolist()
    [0, 2, 3, 4]
    >>> [schedule.sources(s) for s in range(3)]
    [[], ['e', 'v0'], ['e', 'v0', 'v1']]
  """
  if num_layers < 1:
    raise ConfigError(f"num_layers is {num_layers}; it must be at least 1.")
  row = routing.row
  total = 2 * num_layers
  block_size = 1
  if row.block == "layers":
    if routing.num_blocks > num_layers:
      raise ConfigError(
        f"routing.num_blocks is {routing.num_blocks}, more than the"
        f" {num_layers} layers; blocks are made of whole layers."
      )
    block_size = 2 * math.ceil(num_layers / routing.num_blocks)

  sublayer = np.arange(total)
  opens = sublayer % block_size == 0
  # The last block never closes: nothing reads it but the final read, which
  # takes it as the running source.
  closes = (sublayer % block_size == block_size - 1) & (sublayer < total - 1)
  closes &= row.appends != "nothing"
  first_slot = int(row.embedding_source)
  appended = _appended(first_slot, closes)

  visible = appended - (opens & row.newest_hidden)
  if not row.first_read:
    visible[0] = 0
  reads_running = {
    "none": np.zeros(total, bool),
    "delta": ~opens,
    "stream": np.ones(total, bool),
  }[row.running_source]
  num_slots = first_slot + int(closes.sum())
  final = None
  if row.final_read:
    final = Step(
      visible=np.int32(num_slots),
      stored=np.int32(num_slots),
      reads_running=np.bool_(row.running_source != "none"),
      slot=np.int32(0),
      closes=np.bool_(False),
    )
  names = _Names(row.appends, row.running_source, block_size)
  return Schedule(
    num_slots=num_slots,
    needs_stream=row.additive
    or row.running_source == "stream"
    or row.appends in ("state", "difference"),
    steps=Step(
      visible=visible.astype(np.int32),
      stored=_stored(visible, appended, 1),
      reads_running=reads_running,
      # A sublayer that closes nothing rewrites a slot that exists with itself.
      slot=np.where(closes, appended, 0).astype(np.int32),
      closes=closes,
    ),
    final=final,
    slot_names=("e",) * first_slot
    + tuple(names.slot(s) for s in sublayer[closes]),
    running_names=tuple(names.running(s) for s in range(total + 1)),
  )


def _appended(first_slot: int, closes: np.ndarray) -> np.ndarray:
  """How many slots are appended before each sublayer."""
  return first_slot + np.cumsum(closes) - closes


def _stored(
  visible: np.ndarray, appended: np.ndarray, group: int
) -> np.ndarray:
  """`Step.stored` of each sublayer where `group` layers read together."""
  before = np.repeat(appended[:: 2 * group], 2 * group)
  return np.minimum(visible, before).astype(np.int32)


def check_group(routing: RoutingConfig, num_layers: int, group: int) -> None:
  """Raises ConfigError unless so many layers can read in one pass.

  Args:
    routing: the variant.
    num_layers: L.
    group: layers; more than 1 for variants whose sublayers each leave a source.
  """
  divisors = [g for g in range(1, num_layers + 1) if num_layers % g == 0]
  if group not in divisors:
    raise ConfigError(
      f"read_group is {group}; it must divide num_layers {num_layers}: one of"
      f" {', '.join(map(str, divisors))}."
    )
  if group > 1 and routing.row.attention_appends == "nothing":
    raise ConfigError(
      f"read_group is {group}; {routing.variant!r} reads few sources, and only"
      " variants with a source for every sublayer read in groups: use 1."
    )


@dataclasses.dataclass(frozen=True)
class _Names:
  """Names of sources."""

  appends: str
  running_source: str
  block_size: int

  def slot(self, sublayer: int) -> str:
    """The slot appended after `sublayer`."""
    block = sublayer // self.block_size + 1
    delta = f"v{sublayer}" if self.block_size == 1 else f"b{block}"
    return {
      "delta": delta,
      "state": f"p{sublayer + 1}",
      "difference": f"r{block}",
    }[self.appends]

  def running(self, sublayer: int) -> str:
    """The running source before `sublayer`."""
    if self.running_source == "stream":
      return f"p{sublayer}"
    if self.block_size == 1:
      return f"v{sublayer - 1}"
    return f"b{max(sublayer - 1, 0) // self.block_size + 1}+"
