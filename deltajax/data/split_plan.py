"""Which document goes where, and which rows are made by whom.

The text alone decides the split: the first 64 bits of its sha256, as a fraction
of 2**64. Of texts that are equal the first one stays. After that it is known
which tokens each shard holds, so that shards can be made apart.

Memory: a byte for each document, and the index of some 2**20 documents or of
one part.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from pathlib import Path

import numpy as np

from deltajax.data.encoding import EncodedPart
from deltajax.data.packing import check_fills_a_row, rows_per_shard
from deltajax.routing.validation import ConfigError

SPLITS = ("train", "validation", "test")
RULE = (
  "the first 64 bits of the sha256 of the text in UTF-8, over 2**64: below"
  " `test` it is test, below `test` + `validation` validation, else train; of"
  " equal texts the first stays"
)
_DROPPED = len(SPLITS)
_DOCUMENTS_AT_ONCE = 2**20
_MAX_PASSES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fractions:
  """Which part of the documents goes where; the rest is for training.

  Attributes:
    validation: fraction of the documents; 0 for no such split.
    test: as well.
  """

  validation: float = 0.005
  test: float = 0.005

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if not 0 <= value < 1:
        raise ConfigError(f"{name} is {value}; it must be in [0, 1).")
    if self.validation + self.test >= 1:
      raise ConfigError(
        f"validation {self.validation} and test {self.test} leave nothing for"
        " training; together they must be below 1."
      )

  def split_numbers(self, high: np.ndarray) -> np.ndarray:
    """Places in `SPLITS` of texts.

    Args:
      high: [documents] the first 64 bits of their digests.
    """
    bounds = [int(x * 2**64) for x in (self.test, self.test + self.validation)]
    place = np.searchsorted(np.array(bounds, np.uint64), high, side="right")
    return np.array([2, 1, 0], np.uint8)[place]

  def of(self, split: str) -> float:
    """The fraction of a split."""
    train = round(1 - self.validation - self.test, 12)
    return {"train": train, **dataclasses.asdict(self)}[split]

  def names(self) -> list[str]:
    """The splits that there are."""
    return [name for name in SPLITS if self.of(name)]


@dataclasses.dataclass(frozen=True)
class PlannedPart:
  """A part, and where its documents go.

  Attributes:
    encoded: the part.
    places: a file, a byte for each document.
    documents: of each split.
    tokens: of each split, bos and eos counted.
  """

  encoded: EncodedPart
  places: str
  documents: tuple[int, ...]
  tokens: tuple[int, ...]

  def chosen(self, split: str) -> np.ndarray:
    """[documents] booleans: which are in a split."""
    return np.fromfile(self.places, np.uint8) == SPLITS.index(split)


@dataclasses.dataclass(frozen=True)
class PlannedShard:
  """Some rows of a split.

  Attributes:
    split: its name.
    number: among the shards of the split.
    count: of these.
    parts: that hold the documents.
    skip: tokens of the split in these parts that come before the rows.
    num_rows: of the shard.
  """

  split: str
  number: int
  count: int
  parts: tuple[PlannedPart, ...]
  skip: int
  num_rows: int


def plan_splits(
  parts: Sequence[EncodedPart], fractions: Fractions, directory: Path
) -> list[PlannedPart]:
  """Decides for every document of a corpus.

  Args:
    parts: in the order of the corpus.
    fractions: of the splits.
    directory: is made, and holds the decisions.
  """
  directory.mkdir(exist_ok=True)
  planned = []
  for k, (part, first) in enumerate(
    zip(parts, _first_occurrences(parts), strict=True)
  ):
    index = part.index()
    places = fractions.split_numbers(index["high"])
    places[~first] = _DROPPED
    file = directory / f"{k:06}"
    places.tofile(file)
    sizes = index["length"].astype(np.int64) + 2
    chosen = [places == number for number in range(len(SPLITS))]
    planned.append(
      PlannedPart(
        part,
        str(file),
        documents=tuple(int(x.sum()) for x in chosen),
        tokens=tuple(int(sizes[x].sum()) for x in chosen),
      )
    )
  return planned


def check_splits(
  parts: Sequence[PlannedPart], fractions: Fractions, sequence_length: int
) -> None:
  """Raises ConfigError unless every split has at least one row."""
  total = sum(sum(part.documents) for part in parts)
  for name in fractions.names():
    documents, tokens = split_sizes(parts, name)
    try:
      if not documents:
        raise ConfigError("no document falls into it.")
      check_fills_a_row(tokens, documents, sequence_length)
    except ConfigError as error:
      raise ConfigError(
        f"split {name!r}, {fractions.of(name):g} of {total} distinct documents:"
        f" {error}"
      ) from None


def split_sizes(parts: Sequence[PlannedPart], split: str) -> tuple[int, int]:
  """Documents and tokens of a split."""
  k = SPLITS.index(split)
  return sum(p.documents[k] for p in parts), sum(p.tokens[k] for p in parts)


def plan_shards(
  parts: Sequence[PlannedPart], split: str, sequence_length: int
) -> Iterator[PlannedShard]:
  """Yields the shards of a split, all full but the last."""
  width = sequence_length + 1
  ends = np.cumsum([part.tokens[SPLITS.index(split)] for part in parts])
  total = int(ends[-1])
  num_rows, most = -(-total // width), rows_per_shard(sequence_length)
  for number, row in enumerate(range(0, num_rows, most)):
    begin = row * width
    end = min(begin + most * width, total)
    first, last = np.searchsorted(ends, [begin, end - 1], side="right")
    yield PlannedShard(
      split=split,
      number=number,
      count=-(-num_rows // most),
      parts=tuple(parts[first : last + 1]),
      skip=begin - int(ends[first - 1] if first else 0),
      num_rows=min(most, num_rows - row),
    )


def shard_documents(
  shard: PlannedShard, dtype: np.dtype
) -> tuple[int, Iterator[np.ndarray]]:
  """Tokens to skip, and documents, of which the first is the shard's first."""
  first, *rest = shard.parts
  chosen = first.chosen(shard.split)
  sizes = np.where(chosen, first.encoded.index()["length"] + 2, 0)
  ends = np.cumsum(sizes.astype(np.int64))
  before = int(np.searchsorted(ends, shard.skip, side="right"))
  chosen[:before] = False

  def documents() -> Iterator[np.ndarray]:
    yield from first.encoded.documents(chosen, dtype)
    for part in rest:
      yield from part.encoded.documents(part.chosen(shard.split), dtype)

  return shard.skip - int(ends[before - 1] if before else 0), documents()


def _first_occurrences(parts: Sequence[EncodedPart]) -> list[np.ndarray]:
  """Of each part, which documents occur in no document before."""
  counts = [part.num_documents for part in parts]
  total = sum(counts)
  first = np.zeros(total, bool)
  # In passes over the indices, each for its share of the digests.
  passes = min(-(-total // _DOCUMENTS_AT_ONCE), _MAX_PASSES)
  for k in range(passes):
    found = list(_with_digest(parts, k, passes))
    keys = np.concatenate([keys for keys, _ in found])
    numbers = np.concatenate([numbers for _, numbers in found])
    order = np.lexsort((keys["low"], keys["high"]))  # Stable.
    new = np.ones(len(order), bool)
    new[1:] = keys[order[1:]] != keys[order[:-1]]
    first[numbers[order[new]]] = True
  return np.split(first, np.cumsum(counts)[:-1])


def _with_digest(
  parts: Sequence[EncodedPart], share: int, shares: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields digests, one share of all that there can be, and their numbers."""
  begin = 0
  for part in parts:
    keys = part.index()[["high", "low"]]
    of_each = (keys["high"] >> np.uint64(32)) * np.uint64(shares)
    where = np.flatnonzero(of_each >> np.uint64(32) == share)
    yield keys[where], where + begin
    begin += part.num_documents
