"""Corpora of any size to packed rows, whatever happens on the way.

Parts of the corpus are encoded, each by one process, into files of their own
(`encoding`); then it is decided where every document goes (`split_plan`); then
shards of rows are written, again each by one process; then everything is moved
into place in one step. What was finished before a process died is found again.
The result depends neither on that nor on the number of processes.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
import shutil
import time
from typing import Any

from deltajax.data.encoding import remove_unfinished
from deltajax.data.manifest import FILE_NAME, Manifest, read_manifest, Source
from deltajax.data.packed_dataset import (
  PACK_VERSION,
  PackedSplit,
  Shard,
  write_metadata,
)
from deltajax.data.packing import packing_info
from deltajax.data.prepare_tasks import (
  Encode,
  Hash,
  StoredTokenizer,
  WriteShard,
)
from deltajax.data.records import Reading
from deltajax.data.sources import check_part, find_parts, Part
from deltajax.data.split_plan import (
  check_splits,
  Fractions,
  plan_shards,
  plan_splits,
  PlannedPart,
  RULE,
  split_sizes,
)
from deltajax.data.tokenizer_file import FileTokenizer
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.data.workers import available_cores, start_workers, Workers
from deltajax.files import digest_of, try_lock
from deltajax.routing.validation import ConfigError

TOKENIZER_DIRECTORY = "tokenizer"
_LOCK = "lock"
_SECONDS_BETWEEN_LINES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """What is prepared, and how.

  Attributes:
    sources: files and directories, in the order of the corpus.
    tokenizer: `bytes`, or the path (with a "/") of a tokenizer.json or of the
      directory that holds one.
    sequence_length: T, tokens that a model sees at once; rows hold T + 1.
    kind: parquet, jsonl, text or tfds; `auto` for what names of files say.
    pattern: what the names of files in directories must match.
    reading: how records become documents.
    fractions: of the documents that are not for training.
  """

  sources: tuple[str, ...]
  tokenizer: str
  sequence_length: int
  kind: str = "auto"
  pattern: str = "*"
  reading: Reading = dataclasses.field(default_factory=Reading)
  fractions: Fractions = dataclasses.field(default_factory=Fractions)

  def __post_init__(self) -> None:
    if self.sequence_length < 1:
      raise ConfigError(
        f"sequence_length must be at least 1, got {self.sequence_length}."
      )


def prepare(
  corpus: Corpus,
  out: str | os.PathLike[str],
  *,
  workers: int | None = None,
  log: Callable[[str], None] = print,
  keep_refused: bool = True,
) -> Manifest:
  """Makes a packed data set of a corpus, or goes on where a call was killed.

  Args:
    corpus: what to read.
    out: the directory that will hold the data set. Until it is whole, all lies
      beside it, in `out`.partial.
    workers: processes; 0 for this one, None for as many as there are cores.
    log: takes lines on what is done.
    keep_refused: whether what was encoded stays, for another try, where the
      corpus turns out not to fit.

  Returns:
    The manifest of the data set; of that which is there, if it is the same.

  Raises:
    ConfigError: for sources, options or directories that do not fit; as far as
      that can be seen before the work starts, before it does.
  """
  out = Path(out).expanduser().absolute()
  if workers is None:
    workers = available_cores()
  if workers < 0:
    raise ConfigError(f"workers must be at least 0, got {workers}.")
  tokenizer = get_tokenizer(corpus.tokenizer)
  decided = _decided(corpus, tokenizer)
  there = _existing(out)
  if there is not None:
    there.check_same(out, decided)
  parts = find_parts(corpus.sources, kind=corpus.kind, pattern=corpus.pattern)
  for part in parts:
    check_part(part, corpus.reading)
  size = sum(part.num_bytes() for part in parts)
  log(f"sources    {len(parts)} parts, {size / 1e6:.1f} MB")
  log(f"tokenizer  {corpus.tokenizer}, {tokenizer.vocab_size} ids")
  with start_workers(workers, threads=max(1, workers // len(parts))) as pool:
    if there is not None:
      there.check_sources(
        out,
        [part.kind for part in parts],
        pool.run([Hash(part) for part in parts]),
      )
      if _is_scratch(scratch_of(out)):
        with _scratch(out):  # Of a process that was killed at its very end.
          pass
      log(f"written    {out}, before")
      return there
    with _scratch(out, keep_refused) as scratch:
      job = _Job(corpus, tokenizer, decided, scratch, pool, log)
      planned = job.encode(parts)
      rows, splits = job.pack(planned)
      manifest = _manifest(decided, corpus.tokenizer, parts, planned, splits)
      manifest.write(rows)
      os.sync()  # What is in place has reached the disk.
      os.rename(rows, out)
  log(f"written    {out}")
  return manifest


@dataclasses.dataclass(frozen=True)
class _Job:
  """Preparation, in its two halves."""

  corpus: Corpus
  tokenizer: Tokenizer
  decided: dict[str, Any]
  scratch: Path
  pool: Workers
  log: Callable[[str], None]

  @property
  def stored(self) -> StoredTokenizer:
    """The tokenizer, for other processes."""
    return StoredTokenizer(self.corpus.tokenizer, self.tokenizer.fingerprint)

  def encode(self, parts: Sequence[Part]) -> list[PlannedPart]:
    """Encodes all documents, and decides where they go."""
    directory = str(self.scratch / "parts")
    encoded = self.pool.run(
      [
        Encode(part, self.corpus.reading, self.stored, directory)
        for part in parts
      ],
      _Progress("encoded", len(parts), "parts", self.log),
    )
    fractions = self.corpus.fractions
    if not any(part.num_text_bytes for part in encoded):
      documents = sum(part.num_documents for part in encoded)
      raise ConfigError(
        f"the sources hold no text: {documents} documents, all empty."
      )
    planned = plan_splits(encoded, fractions, self.scratch / "places")
    check_splits(planned, fractions, self.corpus.sequence_length)
    return planned

  def pack(
    self, planned: Sequence[PlannedPart]
  ) -> tuple[Path, dict[str, PackedSplit]]:
    """Writes the rows; returns their directory, and what is in it."""
    length = self.corpus.sequence_length
    rows, done = self._directories(planned)
    tasks = [
      WriteShard(shard, length, self.stored, str(rows), str(done))
      for name in self.corpus.fractions.names()
      for shard in plan_shards(planned, name, length)
    ]
    progress = _Progress("packed", len(tasks), "shards", self.log)
    shards: dict[str, list[Shard]] = {}
    for task, shard in zip(tasks, self.pool.run(tasks, progress), strict=True):
      shards.setdefault(task.shard.split, []).append(shard)
    splits = {}
    for name, own in shards.items():
      documents, tokens = split_sizes(planned, name)
      info = packing_info(
        self.tokenizer,
        length,
        num_tokens=tokens,
        num_documents=documents,
        shard_digests=[shard.digest for shard in own],
      )
      splits[name] = PackedSplit(info, own)
    write_metadata(rows, splits, self.tokenizer)
    _copy_tokenizer(self.tokenizer, rows / TOKENIZER_DIRECTORY)
    return rows, splits

  def _directories(self, planned: Sequence[PlannedPart]) -> tuple[Path, Path]:
    """Of rows, and of notes on them; those of other plans are removed."""
    key = [self.decided, [part.encoded.directory for part in planned]]
    digest = digest_of(key)[:16]
    rows, done = (
      self.scratch / f"rows-{digest}",
      self.scratch / f"done-{digest}",
    )
    for other in (*self.scratch.glob("rows-*"), *self.scratch.glob("done-*")):
      if other not in (rows, done):
        shutil.rmtree(other)
    rows.mkdir(exist_ok=True)
    done.mkdir(exist_ok=True)
    return rows, done


class _Progress:
  """Lines on how far some tasks are, with what this call did."""

  def __init__(
    self, verb: str, total: int, of: str, log: Callable[[str], None]
  ):
    self._line = f"{verb:<10} {{}} of {total} {of}"
    self._total, self._log = total, log
    self._begin = self._last = time.monotonic()

  def __call__(self, done: int, documents: int, tokens: int) -> None:
    now = time.monotonic()
    if done < self._total and now - self._last < _SECONDS_BETWEEN_LINES:
      return
    self._last = now
    seconds = max(now - self._begin, 1e-9)
    self._log(
      f"{self._line.format(done)}  {documents:,} documents "
      f" {tokens / 1e6:.1f}M tokens  {documents / seconds:,.0f} documents/s "
      f" {tokens / seconds:,.0f} tokens/s"
    )


def scratch_of(out: Path) -> Path:
  """Where all lies until it is whole."""
  return out.with_name(out.name + ".partial")


@contextlib.contextmanager
def _scratch(out: Path, keep_refused: bool = True) -> Iterator[Path]:
  """The directory of what is not finished, for one process at a time.

  It goes when all is done, or when something is raised before anything is, or a
  corpus is refused of which nothing is to be kept.
  """
  scratch = scratch_of(out)
  if scratch.exists() and not _is_scratch(scratch):
    raise ConfigError(f"{scratch} holds something else; remove it.")
  try:
    scratch.mkdir(parents=True, exist_ok=True)
    # First of all: a directory without it is not ours to go on with.
    lock = open(scratch / _LOCK, "a")  # noqa: SIM115 (closed below)
    (scratch / "parts").mkdir(exist_ok=True)
  except OSError as error:
    raise ConfigError(f"{scratch} cannot be written: {error}.") from None
  with lock:
    if not try_lock(lock):
      raise ConfigError(f"another process is preparing {out} now.")
    remove_unfinished(scratch / "parts")
    try:
      yield scratch
    except BaseException as error:
      refused = isinstance(error, ConfigError) and not keep_refused
      if refused or not any((scratch / "parts").iterdir()):
        _remove(scratch)
      raise
    _remove(scratch)


def _is_scratch(path: Path) -> bool:
  """Whether a directory is one of ours; if so, its lock goes last."""
  return (path / _LOCK).is_file() or (path.is_dir() and not any(path.iterdir()))


def _remove(scratch: Path) -> None:
  for path in scratch.iterdir():
    if path.is_dir():
      shutil.rmtree(path)
  shutil.rmtree(scratch)


def _existing(out: Path) -> Manifest | None:
  """What is at `out`; raises ConfigError if it is something else."""
  if (out / FILE_NAME).is_file():
    return read_manifest(out)
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ConfigError(
      f"{out} holds something that is no prepared data set; name another"
      " directory, or remove it."
    )
  return None


def _decided(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
  """The fields of the manifest that are known before anything is read."""
  fractions = corpus.fractions
  return {
    "pack_version": PACK_VERSION,
    "tokenizer": {
      name: getattr(tokenizer, name)
      for name in ("fingerprint", "vocab_size", "bos_id", "eos_id", "pad_id")
    },
    "sequence_length": corpus.sequence_length,
    "reading": dataclasses.asdict(corpus.reading),
    "split_rule": RULE,
    "fractions": {name: fractions.of(name) for name in fractions.names()},
  }


def _manifest(
  decided: dict[str, Any],
  tokenizer_name: str,
  parts: Sequence[Part],
  planned: Sequence[PlannedPart],
  splits: dict[str, PackedSplit],
) -> Manifest:
  encoded = [part.encoded for part in planned]
  skipped: collections.Counter[str] = collections.Counter()
  for found in encoded:
    skipped.update(found.skipped)
  num_documents = sum(found.num_documents for found in encoded)
  return Manifest(
    **decided,
    tokenizer_name=tokenizer_name,
    num_documents=num_documents,
    num_text_bytes=sum(found.num_text_bytes for found in encoded),
    num_tokens=sum(found.num_tokens for found in encoded),
    duplicates=num_documents - sum(sum(part.documents) for part in planned),
    replaced=sum(found.replaced for found in encoded),
    empty=sum(found.empty for found in encoded),
    skipped=dict(sorted(skipped.items())),
    splits={name: split.info for name, split in splits.items()},
    sources=tuple(
      Source(
        kind=part.kind,
        path=part.paths[0],
        num_files=len(part.paths),
        num_bytes=found.num_bytes,
        sha256=found.sha256,
        num_documents=found.num_documents,
        num_tokens=found.num_tokens,
        replaced=found.replaced,
        skipped=found.skipped,
        empty=found.empty,
      )
      for part, found in zip(parts, encoded, strict=True)
    ),
  )


def _copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
  """Puts the files of a tokenizer beside the rows that it made."""
  if isinstance(tokenizer, FileTokenizer):
    directory.mkdir(exist_ok=True)
    for name, file in tokenizer.files().items():
      shutil.copyfile(file, directory / name)
