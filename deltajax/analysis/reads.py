"""The reads of a model over depth, and the names of what each may attend to."""

import dataclasses

from deltajax.config import ModelConfig
from deltajax.routing.schedule import build_schedule, Schedule

ROLES = ("Q/K", "V")
NULL = "null"


@dataclasses.dataclass(frozen=True)
class Read:
  """One softmax over depth.

  Attributes:
    kind: `attention`, `mlp` or `final`.
    layer: transformer layer; None for the final read.
    role: `Q/K` or `V`; empty where all roles share the read.
    sources: names of what it sees: `null` first, if there is one, then those
      of `Schedule.sources`.
    open_source: whether the last of them is not a slot of the memory but what
      runs along: what a block has added so far, or the stream.
    columns: where the sources lie among the weights that are captured.
    index: which read of its router it is.
  """

  kind: str
  layer: int | None
  role: str
  sources: tuple[str, ...]
  open_source: bool
  columns: tuple[int, ...]
  index: int

  @property
  def name(self) -> str:
    """For example `layer 3 attention V`, or `final`."""
    place = "" if self.layer is None else f"layer {self.layer} "
    return f"{place}{self.kind} {self.role}".strip()

  @property
  def router(self) -> str:
    """The module that makes it."""
    return f"{self.kind}_router"


def model_reads(config: ModelConfig) -> list[Read]:
  """The reads that see any source, in order of depth, Q/K before V.

  Args:
    config: of the model.
  """
  routing = config.routing
  schedule = build_schedule(routing, config.num_layers)
  places: list[int | None] = [*range(schedule.num_sublayers)]
  if schedule.final is not None:
    places.append(None)
  found = []
  for place in places:
    kind = "final" if place is None else ("attention", "mlp")[place % 2]
    roles = routing.row.roles if kind == "attention" else None
    names = ROLES if roles is not None and roles.num_reads == 2 else ("",)
    seen = _columns(schedule, place, routing.null_source)
    if not seen:
      continue
    step = schedule.final if place is None else schedule.step(place)
    assert step is not None
    found += [
      Read(
        kind=kind,
        layer=None if place is None else place // 2,
        role=role,
        sources=tuple(seen),
        open_source=bool(step.reads_running),
        columns=tuple(seen.values()),
        index=index,
      )
      for index, role in enumerate(names)
    ]
  return found


def _columns(
  schedule: Schedule, sublayer: int | None, has_null: bool
) -> dict[str, int]:
  """Source name -> column of the captured weights."""
  step = schedule.final if sublayer is None else schedule.step(sublayer)
  assert step is not None
  columns = list(range(int(step.visible)))
  if step.reads_running:
    columns.append(schedule.num_slots)
  names = schedule.sources(sublayer)
  seen = {
    name: column + has_null for name, column in zip(names, columns, strict=True)
  }
  return {NULL: 0, **seen} if has_null else seen
