"""Sources of documents: what a user names becomes parts, in a fixed order.

A part is what one process reads in one go: a file, or many small files of text.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import fnmatch
import hashlib
import os
from pathlib import Path

from deltajax.data import records, storage
from deltajax.data.records import Bad, Reading, Tally
from deltajax.routing.validation import check_name, ConfigError

KINDS = ("parquet", "jsonl", "text", "tfds")
SUFFIXES = {
  ".parquet": "parquet",
  ".jsonl": "jsonl",
  ".jsonl.gz": "jsonl",
  ".jsonl.zst": "jsonl",
  ".txt": "text",
}
# Files of text that are read in one go.
_FILES_AT_ONCE = 4096
_BYTES_AT_ONCE = 2**26


@dataclasses.dataclass(frozen=True)
class Part:
  """What is read in one go.

  Attributes:
    kind: one of `KINDS`.
    paths: one file, or some files of text.
    split: of a TFDS set.
    begin: the first record of that split.
    end: one behind the last.
  """

  kind: str
  paths: tuple[str, ...]
  split: str = ""
  begin: int = 0
  end: int = 0

  @property
  def name(self) -> str:
    """For messages."""
    more = len(self.paths) - 1
    return self.paths[0] + (f" and {more} more" if more else "")

  def num_bytes(self) -> int:
    """Of all files."""
    return sum(os.path.getsize(path) for path in self.paths)

  def sha256(self) -> str:
    """Of the file (hex); of several, that of the lines of theirs."""
    found = [_file_sha256(path) for path in self.paths]
    if len(found) == 1:
      return found[0]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def find_parts(
  sources: Sequence[str], *, kind: str = "auto", pattern: str = "*"
) -> list[Part]:
  """Returns what there is to read, in the order in which it is read.

  Args:
    sources: files and directories, in this order; what is below a directory in
      the order of the paths, without hidden files.
    kind: one of `KINDS` for all files, or `auto` for what their names say.
    pattern: what the names of files in directories must match.

  Raises:
    ConfigError: a source is missing, named twice, or holds files whose kind is
      not known.
  """
  check_name("kind", kind, ("auto", *KINDS))
  if not sources:
    raise ConfigError("no source is given; name files or directories.")
  parts: list[Part] = []
  seen: set[str] = set()
  for source in sources:
    path = Path(source).expanduser()
    if not path.exists():
      raise ConfigError(
        f"source {source!r} does not exist; name a file or a directory."
      )
    found = _parts_below(path, kind, pattern)
    for file in (file for part in found for file in part.paths):
      real = os.path.realpath(file)
      if real in seen:
        raise ConfigError(f"{file} is in two sources; name it once.")
      seen.add(real)
    parts += found
  return parts


def check_part(part: Part, reading: Reading) -> None:
  """Raises ConfigError for what can be seen without reading all of it."""
  path = part.paths[0]
  if part.kind != "text" and not os.path.getsize(path):
    raise ConfigError(f"{path} is an empty file.")
  if part.kind == "tfds":
    builder = storage.open_dataset(os.path.dirname(path))
    storage.check_feature(builder, reading.column)
  elif part.kind == "parquet":
    records.open_parquet(path, reading.column).close()
  elif part.kind == "jsonl":
    next(read_documents(part, reading, Tally()), None)


def read_documents(part: Part, reading: Reading, tally: Tally) -> Iterator[str]:
  """Yields the texts of a part, in stored order.

  Args:
    part: what to read.
    reading: how.
    tally: is added to.

  Raises:
    ConfigError: a record that cannot be used, if `reading` does not say
      otherwise; a file that is damaged.
  """
  return records.documents(_records(part, reading, tally), reading, tally)


def _records(part: Part, reading: Reading, tally: Tally) -> Iterator[str | Bad]:
  path = part.paths[0]
  if part.kind == "parquet":
    return records.parquet(path, reading, tally)
  if part.kind == "jsonl":
    return records.jsonl(path, reading, tally)
  if part.kind == "text":
    return records.texts(part.paths, reading, tally)
  return records.tfds(
    os.path.dirname(path), part.split, part.begin, part.end, reading, tally
  )


def _parts_below(path: Path, kind: str, pattern: str) -> list[Part]:
  if path.is_file():
    return [Part(_kind_of(path, kind), (str(path),))]
  if kind == "tfds" or (kind == "auto" and storage.is_dataset(path)):
    return _tfds_parts(path, pattern)
  files = [
    file
    for file in _files_below(path)
    if fnmatch.fnmatchcase(file.name, pattern)
  ]
  if not files:
    raise ConfigError(f"{path} holds no file like {pattern!r}.")
  kinds = {_kind_of(file, kind) for file in files}
  if len(kinds) > 1:
    raise ConfigError(
      f"{path} holds files of several kinds: {', '.join(sorted(kinds))}; choose"
      " with a pattern such as '*.parquet'."
    )
  (kind,) = kinds
  if kind == "text":
    return _text_parts(files)
  return [Part(kind, (str(file),)) for file in files]


def _kind_of(file: Path, kind: str) -> str:
  if kind == "tfds":
    raise ConfigError(f"{file} is a file; a TFDS set is named by directory.")
  if kind != "auto":
    return kind
  for suffix, found in SUFFIXES.items():
    if file.name.endswith(suffix):
      return found
  raise ConfigError(
    f"{file} is of no known type: {', '.join(SUFFIXES)}. Say which it is with"
    " kind, or leave it out with a pattern such as '*.parquet'."
  )


def _files_below(directory: Path) -> list[Path]:
  found = []
  for place, below, names in os.walk(directory):
    below[:] = [name for name in below if not name.startswith(".")]
    found += [Path(place, name) for name in names if not name.startswith(".")]
  return sorted(found, key=lambda file: file.relative_to(directory).parts)


def _text_parts(files: Sequence[Path]) -> list[Part]:
  """Many small files are one part: each part has a price."""
  parts, some, size = [], [], 0
  for file in files:
    some.append(str(file))
    size += file.stat().st_size
    if len(some) == _FILES_AT_ONCE or size >= _BYTES_AT_ONCE:
      parts.append(Part("text", tuple(some)))
      some, size = [], 0
  return parts + ([Part("text", tuple(some))] if some else [])


def _tfds_parts(directory: Path, pattern: str) -> list[Part]:
  builder = storage.open_dataset(directory)
  parts = []
  for split, info in sorted(builder.info.splits.items()):
    storage.records(builder, split)  # Raises unless it can be read.
    begin = 0
    for path, length in zip(info.filepaths, info.shard_lengths, strict=True):
      if length and fnmatch.fnmatchcase(path.name, pattern):
        files = (str(path),)
        parts.append(Part("tfds", files, split, begin, begin + length))
      begin += length
  if not parts:
    raise ConfigError(f"{directory} holds no records in files like {pattern!r}")
  return parts


def _file_sha256(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
