"""Pictures of routing schedules: what each sublayer reads, and what it leaves.

Drawn from `build_schedule`, so that a picture cannot tell anything else than
what runs. The result is SVG, which needs no library:

    print(schedule_picture(RoutingConfig(variant="delta"), num_layers=6))
"""

from collections.abc import Iterator, Sequence
import dataclasses
from xml.sax.saxutils import escape

from deltajax.routing.schedule import build_schedule, Schedule, Step
from deltajax.routing.variants import Roles, RoutingConfig, Variant

# Okabe and Ito's, which can be told apart with any colour vision; queries in
# their order, and grey for a read that learns none.
_QUERIES, _NO_QUERY = ("#0072B2", "#E69F00"), "#999999"
_STREAM, _INK, _FAINT = "#333333", "#222222", "#dddddd"
_CELL, _LEFT, _TOP, _SIGN = 22, 124, 78, 180
_FONT = "font-family='Helvetica, Arial, sans-serif'"
STREAM_COLUMN = "p"


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of a picture: a sublayer, or the final read.

  Attributes:
    label: for example `layer 0  attention`.
    reads: columns that are read.
    open: the one of these, if any, that is no slot of the memory.
    hidden: columns that are in the memory and are not read.
    appends: the column that the memory has after the sublayer, if it closes a
      block.
    adds_stream: whether the stream enters as it is.
    roles: how its queries become its inputs.
  """

  label: str
  reads: tuple[str, ...]
  open: str | None
  hidden: tuple[str, ...]
  appends: str | None
  adds_stream: bool
  roles: Roles


def picture_rows(routing: RoutingConfig, num_layers: int) -> list[Row]:
  """The lines of a picture, in order of depth.

  Args:
    routing: the variant and its options.
    num_layers: L; there are 2L sublayers.

  Raises:
    ConfigError: if there are fewer layers than blocks.
  """
  schedule = build_schedule(routing, num_layers)
  row = routing.row
  first = schedule.num_slots - int(schedule.steps.closes.sum())
  rows = []
  for s in range(schedule.num_sublayers):
    step = schedule.step(s)
    stored = schedule.slot_names[: first + int(schedule.steps.closes[:s].sum())]
    kind = "MLP" if s % 2 else "attention"
    rows.append(
      _row(
        f"layer {s // 2}  {kind}",
        schedule.sources(s),
        step,
        stored,
        appends=schedule.slot_names[int(step.slot)] if step.closes else None,
        adds_stream=row.additive,
        roles=row.single_role if s % 2 else row.roles,
      )
    )
  if schedule.final is not None:
    rows.append(
      _row(
        "final read",
        schedule.sources(None),
        schedule.final,
        schedule.slot_names,
        appends=None,
        adds_stream=row.additive,
        roles=row.single_role,
      )
    )
  return rows


def schedule_picture(routing: RoutingConfig, num_layers: int) -> str:
  """Returns an SVG: sublayers from top to bottom, sources from left to right.

  Args:
    routing: the variant and its options.
    num_layers: L.

  Raises:
    ConfigError: if there are fewer layers than blocks.
  """
  rows = picture_rows(routing, num_layers)
  columns = _columns(rows, build_schedule(routing, num_layers))
  width = max(_LEFT + _CELL * len(columns) + 12, 380)
  signs = list(_signs(rows, routing.row))
  per_line = width // _SIGN
  bottom = _TOP + _CELL * len(rows)
  height = bottom + 24 + 20 * -(-len(signs) // per_line)
  about = (
    f"{routing.variant}, {num_layers} layers: which sources each sublayer reads"
  )
  lines = [
    f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}'"
    f" height='{height}' viewBox='0 0 {width} {height}' role='img'"
    f" {_FONT} font-size='11' fill='{_INK}'>",
    f"<title>{escape(about)}</title>",
    f"<rect width='{width}' height='{height}' fill='white'/>",
    _text(12, 22, routing.variant, size=15, weight="bold"),
    _text(12, 40, routing.row.summary),
  ]
  for i, name in enumerate(columns):
    lines.append(_text(_x(i) + _CELL / 2, _TOP - 8, name, anchor="middle"))
  for r, row in enumerate(rows):
    y = _TOP + _CELL * r
    lines.append(_text(_LEFT - 10, y + 16, row.label, anchor="end"))
    for i, name in enumerate(columns):
      lines.extend(_cell(_x(i), y, name, row))
  if rows and columns[1:2] == ["e"]:
    lines.append(_bar(_x(1), _TOP - 2))
  for i, (sign, meaning) in enumerate(signs):
    x = 12 + _SIGN * (i % per_line)
    y = bottom + 12 + 20 * (i // per_line)
    lines += [f"<g transform='translate({x} {y}) scale(0.7)'>", *sign, "</g>"]
    lines.append(_text(x + 22, y + 11, meaning))
  return "\n".join([*lines, "</svg>", ""])


def _row(label, sources, step: Step, stored, **rest) -> Row:
  names = tuple(_column(name) for name in sources)
  return Row(
    label=label,
    reads=names,
    open=names[-1] if step.reads_running else None,
    hidden=tuple(stored[int(step.visible) :]),
    **rest,
  )


def _column(name: str) -> str:
  """The open form of a block has the column of the block."""
  return name.removesuffix("+")


def _columns(rows: Sequence[Row], schedule: Schedule) -> list[str]:
  """The stream, then all sources in the order in which they come."""
  slots = schedule.slot_names
  read = [name for row in rows for name in row.reads if name not in slots]
  return [
    STREAM_COLUMN,
    *dict.fromkeys([*slots, *(name for name in read if not _is_stream(name))]),
  ]


def _is_stream(name: str) -> bool:
  return name[:1] == "p" and name[1:].isdecimal()


def _cell(x: float, y: float, name: str, row: Row) -> Iterator[str]:
  is_open = name == row.open
  if name == STREAM_COLUMN:
    is_open = row.open is not None and _is_stream(row.open)
  if name in row.reads or (name == STREAM_COLUMN and is_open):
    yield from _read(x, y, row.roles)
    if is_open:
      yield _ring(x, y)
  elif name == STREAM_COLUMN and (row.adds_stream or not row.reads):
    yield _box(x, y, _STREAM)
  elif name in row.hidden:
    yield _dashed(x, y)
  else:
    yield _box(x, y, "none", _FAINT)
  if name == row.appends:
    yield _bar(x, y + _CELL - 2)


def _read(x: float, y: float, roles: Roles) -> Iterator[str]:
  """A cell: side by side the roles, one above the other reads that they mix."""
  size = _CELL - 4
  wide = size / len(roles.inputs)
  for u, mixed in enumerate(roles.inputs):
    reads = [r for r, weight in enumerate(mixed) if weight]
    high = size / len(reads)
    for k, r in enumerate(reads):
      yield (
        f"<rect x='{x + 2 + wide * u:g}' y='{y + 2 + high * k:g}'"
        f" width='{wide:g}' height='{high:g}' fill='{_colour(roles, r)}'/>"
      )
  if len(roles.inputs) > 1:
    middle = x + _CELL / 2
    yield (f"<path d='M{middle:g} {y + 2:g}v{size}' stroke='white'/>")


def _colour(roles: Roles, read: int) -> str:
  learned = [q for q, weight in enumerate(roles.queries[read]) if weight]
  return _QUERIES[learned[0]] if learned else _NO_QUERY


def _signs(rows: Sequence[Row], variant: Variant) -> Iterator[tuple]:
  """What stands in the picture, and what it means."""
  kinds = list(dict.fromkeys(row.roles for row in rows if row.reads))
  for roles in kinds:
    yield list(_read(0, 0, roles)), _meaning(roles, variant)
  if any(row.open for row in rows):
    yield [_box(0, 0, _QUERIES[0]), _ring(0, 0)], "read while still open"
  if any(row.adds_stream or not row.reads for row in rows):
    yield [_box(0, 0, _STREAM)], "stream, with weight 1"
  if any(row.hidden for row in rows):
    yield [_dashed(0, 0)], "stored, not read"
  if any(row.appends for row in rows):
    yield [_bar(0, 11)], "stored here"


def _meaning(roles: Roles, variant: Variant) -> str:
  if not roles.num_queries:
    return "read, nothing learned"
  if len(roles.inputs) == 1:
    return "read" if variant.roles == roles else "read, one role"
  if any(sum(bool(weight) for weight in row) > 1 for row in roles.inputs):
    return "Q/K and V: mean of two reads"
  if not any(roles.queries[-1]):
    return "left Q/K; right V, uniform"
  if roles.num_queries == 1:
    return "left Q/K, right V: one query"
  return "left Q/K, right V"


def _x(column: int) -> int:
  return _LEFT + _CELL * column + (4 if column else 0)


def _box(x: float, y: float, fill: str, stroke: str = "none") -> str:
  size = _CELL - 4
  return (
    f"<rect x='{x + 2:g}' y='{y + 2:g}' width='{size}' height='{size}'"
    f" fill='{fill}' stroke='{stroke}'/>"
  )


def _dashed(x: float, y: float) -> str:
  box = _box(x, y, "none", _INK)
  return box.removesuffix("/>") + " stroke-dasharray='3 2'/>"


def _ring(x: float, y: float) -> str:
  middle = _CELL / 2
  return (
    f"<circle cx='{x + middle:g}' cy='{y + middle:g}' r='5' fill='white'"
    f" stroke='{_INK}'/>"
  )


def _bar(x: float, y: float) -> str:
  return (
    f"<rect x='{x:g}' y='{y - 1:g}' width='{_CELL}' height='4' rx='1'"
    f" fill='{_INK}'/>"
  )


def _text(
  x: float,
  y: float,
  text: str,
  *,
  size: int = 11,
  weight: str = "normal",
  anchor: str = "start",
) -> str:
  return (
    f"<text x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}'"
    f" text-anchor='{anchor}'>{escape(text)}</text>"
  )
