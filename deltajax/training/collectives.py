"""Which collectives a compiled program runs, read from its HLO text.

Counts are executions on one device in one call, bytes are those of their
results on it. A collective inside of a loop counts once for every trip where
the number of trips is a constant; loops that end when the data say so (a read
of the depth memory visits the sources that exist so far) count one trip, and
are reported as such.

The compiler chooses the kinds: on a TPU it may write a gather as an all-reduce
of zero-padded shards.
"""

from collections.abc import Iterator
import dataclasses
import math
import re

KINDS = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r"(?:^|[\s)}])([a-z][a-z\-]*)\(")
_CALLED = re.compile(
  r"(?:calls|to_apply|branch_computations|called_computations"
  r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:?=?\s*\{"?n"?:"?(\d+)"?\}')
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Collective:
  """All collectives of a kind.

  Attributes:
    kind: one of `KINDS`.
    count: executions on one device.
    bytes: of all their results on it.
    data_dependent: how many of `count` are in loops whose trips are not
      known before they run; one trip is counted.
  """

  kind: str
  count: int
  bytes: int
  data_dependent: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
  operation: str
  result: str
  line: str


def count_collectives(hlo: str) -> list[Collective]:
  """The collectives of a program, by kind.

  Args:
    hlo: text of the optimised module, `compiled.as_text()`.
  """
  computations, entry = _computations(hlo)
  found = list(_walk(computations, entry, 1, False))
  return [
    Collective(
      kind,
      count=sum(trips for _, _, trips, _ in group),
      bytes=sum(size * trips for _, size, trips, _ in group),
      data_dependent=sum(trips for *_, trips, unknown in group if unknown),
    )
    for kind in KINDS
    if (group := [row for row in found if row[0] == kind])
  ]


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
  computations: dict[str, list[_Instruction]] = {}
  entry = current = ""
  for line in hlo.splitlines():
    if header := _COMPUTATION.match(line):
      current = header[1]
      computations[current] = []
      if line.startswith("ENTRY"):
        entry = current
    elif (body := _INSTRUCTION.match(line)) and (
      operation := _OPERATION.search(_without_comments(body[1]))
    ):
      text = _without_comments(body[1])
      computations[current].append(
        _Instruction(operation[1], text[: operation.start(1)], line)
      )
  return computations, entry


def _without_comments(text: str) -> str:
  return re.sub(r"/\*.*?\*/", "", text)


def _walk(
  computations: dict[str, list[_Instruction]],
  name: str,
  trips: int,
  unknown: bool,
) -> Iterator[tuple[str, int, int, bool]]:
  """Yields (kind, bytes, executions, in a loop of unknown length)."""
  for instruction in computations.get(name, ()):
    operation = instruction.operation
    # Of a pair, the second has the result alone.
    kind = operation.removesuffix("-done")
    if kind in KINDS:
      yield kind, _size(instruction.result), trips, unknown
    elif operation == "while":
      condition = _attribute(instruction.line, "condition")
      known = _trips(instruction.line, computations.get(condition, ()))
      yield from _walk(
        computations,
        _attribute(instruction.line, "body"),
        trips * (known or 1),
        unknown or known is None,
      )
    elif not operation.endswith(("-done", "-update")) and (
      operation.removesuffix("-start") not in KINDS
    ):
      for called in _called(instruction.line):
        rows = list(_walk(computations, called, trips, unknown))
        if called.startswith("all-reduce-scatter"):
          # A TPU fusion: an all-reduce of which each device keeps a slice.
          size = _size(instruction.result)
          rows = [("reduce-scatter", size, n, open_) for *_, n, open_ in rows]
        yield from rows


def _called(line: str) -> list[str]:
  return [
    name.strip().lstrip("%")
    for names in _CALLED.findall(line)
    for name in names.strip("{}").split(",")
  ]


def _attribute(line: str, name: str) -> str:
  match = re.search(rf"\b{name}=%?([\w.\-]+)", line)
  return match[1] if match else ""


def _trips(line: str, condition) -> int | None:
  """Trips of a loop: as the compiler says, or 0 .. constant."""
  if known := _KNOWN_TRIPS.search(line):
    return int(known[1])
  constants = [
    int(match[1]) for i in condition if (match := _CONSTANT.search(i.line))
  ]
  counts_up = any("direction=LT" in i.line for i in condition)
  return constants[0] if counts_up and len(constants) == 1 else None


def _size(shapes: str) -> int:
  """Bytes of a shape or of a tuple of shapes."""
  return int(
    sum(
      _itemsize(dtype) * math.prod(int(n) for n in sizes.split(",") if n)
      for dtype, sizes in _SHAPE.findall(shapes)
    )
  )


def _itemsize(dtype: str) -> float:
  if dtype in _BYTES:
    return _BYTES[dtype]
  bits = re.match(r"[a-z]+(\d+)", dtype)
  return int(bits[1]) / 8 if bits else 0
