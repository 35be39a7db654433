"""Parts of a corpus as token ids on disk, each made once by some process.

The first half of preparation. A part becomes a directory, named after what
decides its content: the bytes of its files, how they are read, the tokenizer.
So a run that was killed finds what it had finished, and nobody needs to know
who made it.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import shutil

import numpy as np

from deltajax.data import storage
from deltajax.data.packing import checked_ids, token_dtype
from deltajax.data.records import Reading, Tally
from deltajax.data.sources import Part, read_documents
from deltajax.data.tokenizers import Tokenizer
from deltajax.data.workers import Tick
from deltajax.files import digest_of, flush, naming, write_file
from deltajax.routing.validation import ConfigError

# To be raised when the same part gives other files.
_VERSION = 2
# Half of a sha256 of the text, as two numbers, and the number of token ids.
INDEX = np.dtype([("high", ">u8"), ("low", ">u8"), ("length", "<u8")])
_FILES = ("index", "tokens")
_NOTES = "notes.json"
_BYTES_AT_ONCE = 2**20
_DOCUMENTS_AT_ONCE = 2**12
_TOKENS_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True)
class EncodedPart:
  """A part on disk, without bos and eos.

  Attributes:
    directory: where.
    sha256: of what was read.
    num_bytes: of the files that were read.
    num_documents: that came of it.
    num_text_bytes: of these, as UTF-8.
    num_tokens: of these.
    replaced: documents in which bytes were replaced.
    skipped: records that gave no document, by reason.
    empty: documents without text.
  """

  directory: str
  sha256: str
  num_bytes: int
  num_documents: int
  num_text_bytes: int
  num_tokens: int
  replaced: int
  skipped: dict[str, int]
  empty: int

  def index(self) -> np.ndarray:
    """[documents] of type `INDEX`."""
    return np.fromfile(Path(self.directory, "index"), INDEX)

  def documents(
    self, chosen: np.ndarray, dtype: np.dtype
  ) -> Iterator[np.ndarray]:
    """Yields the token ids of some documents, in stored order.

    Args:
      chosen: [documents] booleans.
      dtype: that of the tokenizer.
    """
    ends = np.cumsum(self.index()["length"].astype(np.int64))
    begins = np.append(0, ends)
    with open(Path(self.directory, "tokens"), "rb") as file:
      first = 0
      while first < len(ends):
        limit = begins[first] + _TOKENS_AT_ONCE
        last = max(first + 1, int(np.searchsorted(ends, limit)))
        if chosen[first:last].any():
          file.seek(begins[first] * dtype.itemsize)
          block = np.fromfile(file, dtype, begins[last] - begins[first])
          for k in first + np.flatnonzero(chosen[first:last]):
            yield block[begins[k] - begins[first] : ends[k] - begins[first]]
        first = last


def encode_part(
  part: Part,
  *,
  reading: Reading,
  tokenizer: Tokenizer,
  directory: str | os.PathLike[str],
  tick: Tick,
) -> EncodedPart:
  """Encodes a part, unless that was done before.

  Args:
    part: what to read.
    reading: how.
    tokenizer: what to encode with.
    directory: holds the parts.
    tick: is told of progress; what it raises stops the work.

  Raises:
    ConfigError: the part cannot be used; see `read_documents`.
  """
  before = _times(part)
  sha256 = part.sha256()
  # The suffix says how a file is compressed.
  how = [part.kind, Path(part.paths[0]).suffix, dataclasses.asdict(reading)]
  what = [sha256, part.split, part.begin, part.end]
  key = [_VERSION, *how, *what, tokenizer.fingerprint]
  name = digest_of(key)[:32]
  target = Path(directory, name)

  def write(scratch: Path) -> Path:
    with naming(scratch):
      counts = _write(part, reading, tokenizer, scratch, tick)
    if _times(part) != before:
      raise ConfigError(f"{part.name} was changed while it was read.")
    notes = {"sizes": _sizes(scratch), "counts": counts}
    for file in _FILES:  # Notes must not reach the disk before what they note.
      flush(scratch / file)
    write_file(scratch / _NOTES, json.dumps(notes))
    return scratch

  storage.build_once(target, directory, write)
  return EncodedPart(
    directory=str(target),
    sha256=sha256,
    num_bytes=part.num_bytes(),
    **json.loads((target / _NOTES).read_text())["counts"],
  )


def remove_unfinished(directory: Path) -> None:
  """Removes what a process left that ended too soon, or a loss of power.

  Args:
    directory: holds the parts; no process may be at work there.
  """
  for target in directory.iterdir():
    if not _is_whole(target):
      shutil.rmtree(target)


def _is_whole(target: Path) -> bool:
  try:
    sizes = json.loads((target / _NOTES).read_text())["sizes"]
    return sizes == _sizes(target)
  except (OSError, ValueError):
    return False


def _sizes(target: Path) -> dict[str, int]:
  return {name: (target / name).stat().st_size for name in _FILES}


def _write(
  part: Part,
  reading: Reading,
  tokenizer: Tokenizer,
  directory: Path,
  tick: Tick,
) -> dict[str, object]:
  """Writes `_FILES`; returns the counts."""
  dtype = token_dtype(tokenizer)
  tally = Tally()
  documents = tokens = text_bytes = empty = 0
  with (
    open(directory / "index", "wb") as index_file,
    open(directory / "tokens", "wb") as tokens_file,
  ):
    for texts, raws in _batches(read_documents(part, reading, tally)):
      encoded = tokenizer.encode_batch(texts)
      index = np.zeros(len(raws), INDEX)
      for k, (raw, ids) in enumerate(zip(raws, encoded, strict=True)):
        digest = hashlib.sha256(raw).digest()
        index[k] = (*np.frombuffer(digest, ">u8", 2), len(ids))
        try:
          ids = checked_ids(ids, documents + k, tokenizer.vocab_size)
        except ConfigError as error:
          raise ConfigError(f"{part.name}: {error}") from None
        tokens_file.write(ids.astype(dtype).data)
      index_file.write(index.data)
      documents += len(raws)
      done = int(index["length"].sum())
      tokens += done
      text_bytes += sum(map(len, raws))
      empty += raws.count(b"")
      tick(len(raws), done)
  return {
    "num_documents": documents,
    "num_text_bytes": text_bytes,
    "num_tokens": tokens,
    "empty": empty,
    **dataclasses.asdict(tally),
  }


def _batches(
  documents: Iterator[str],
) -> Iterator[tuple[list[str], list[bytes]]]:
  """Yields texts and their UTF-8, as many as are encoded in one go."""
  texts: list[str] = []
  raws: list[bytes] = []
  size = 0
  for text in documents:
    texts.append(text)
    raws.append(text.encode())
    size += len(raws[-1])
    if size >= _BYTES_AT_ONCE or len(texts) == _DOCUMENTS_AT_ONCE:
      yield texts, raws
      texts, raws, size = [], [], 0
  if texts:
    yield texts, raws


def _times(part: Part) -> list[tuple[int, int]]:
  stats = map(os.stat, part.paths)
  return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
