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
import fcntl
import functools
import hashlib
import json
import os
from pathlib import Path
import shutil
import time
from typing import Any

from deltajax.data.encoding import encode_part, EncodedPart
from deltajax.data.manifest import FILE_NAME, Manifest, read_manifest, Source
from deltajax.data.packed_dataset import (
  PACK_VERSION,
  PackedSplit,
  Shard,
  shard_name,
  write_metadata,
  write_shard,
)
from deltajax.data.packing import (
  pack_rows,
  PackedRow,
  Packer,
  packing_info,
  token_dtype,
)
from deltajax.data.records import Reading
from deltajax.data.sources import check_part, find_parts, Part
from deltajax.data.split_plan import (
  check_splits,
  Fractions,
  plan_shards,
  plan_splits,
  PlannedPart,
  PlannedShard,
  RULE,
  shard_documents,
  split_sizes,
)
from deltajax.data.tokenizer_file import FileTokenizer
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.data.workers import (
  available_cores,
  start_workers,
  Tick,
  Workers,
)
from deltajax.routing.validation import ConfigError

TOKENIZER_DIRECTORY = "tokenizer"
_LOCK = "lock"
_SECONDS_BETWEEN_LINES = 10
_TOKENS_BETWEEN_TICKS = 2**20


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
) -> Manifest:
  """Makes a packed data set of a corpus, or goes on where a call was killed.

  Args:
    corpus: what to read.
    out: the directory that will hold the data set. Until it is whole, all lies
      beside it, in `out`.partial.
    workers: processes; 0 for this one, None for as many as there are cores.
    log: takes lines on what is done.

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
  wanted = _decided(corpus, tokenizer)
  parts = find_parts(corpus.sources, kind=corpus.kind, pattern=corpus.pattern)
  for part in parts:
    check_part(part, corpus.reading)
  there = _existing(out)
  size = sum(part.num_bytes() for part in parts)
  log(
    f"sources    {len(parts)} parts, {size / 1e6:.1f} MB"
    f"\ntokenizer  {corpus.tokenizer}, {tokenizer.vocab_size} ids"
  )
  threads = max(1, workers // len(parts))
  with start_workers(workers, threads=threads) as pool:
    if there is not None:
      there.check_same(out, wanted, pool.run([_Hash(part) for part in parts]))
      shutil.rmtree(_scratch_of(out), ignore_errors=True)
      log(f"written    {out}, before")
      return there
    with _scratch(out) as scratch:
      return _prepare(corpus, tokenizer, wanted, parts, out, scratch, pool, log)


def _prepare(
  corpus: Corpus,
  tokenizer: Tokenizer,
  wanted: dict[str, Any],
  parts: Sequence[Part],
  out: Path,
  scratch: Path,
  pool: Workers,
  log: Callable[[str], None],
) -> Manifest:
  length = corpus.sequence_length
  stored = _StoredTokenizer(corpus.tokenizer, tokenizer.fingerprint)
  encoded = pool.run(
    [
      _Encode(part, corpus.reading, stored, str(scratch / "parts"))
      for part in parts
    ],
    _Progress("encoded", len(parts), "parts", log),
  )
  planned = plan_splits(encoded, corpus.fractions, scratch / "places")
  check_splits(planned, corpus.fractions, length)
  names = corpus.fractions.names()

  key = json.dumps([wanted, [part.directory for part in encoded]])
  digest = hashlib.sha256(key.encode()).hexdigest()[:16]
  rows, done = scratch / f"rows-{digest}", scratch / f"done-{digest}"
  for other in {*scratch.glob("rows-*"), *scratch.glob("done-*")}:
    if other not in (rows, done):
      shutil.rmtree(other)
  rows.mkdir(exist_ok=True)
  done.mkdir(exist_ok=True)
  tasks = [
    _WriteShard(shard, length, stored, str(rows), str(done))
    for name in names
    for shard in plan_shards(planned, name, length)
  ]
  shards = pool.run(tasks, _Progress("packed", len(tasks), "shards", log))

  splits = {}
  for name in names:
    documents, tokens = split_sizes(planned, name)
    own = [
      shard
      for task, shard in zip(tasks, shards, strict=True)
      if task.shard.split == name
    ]
    info = packing_info(
      tokenizer,
      length,
      num_tokens=tokens,
      num_documents=documents,
      shard_digests=[shard.digest for shard in own],
    )
    splits[name] = PackedSplit(info, own)
  write_metadata(rows, splits, tokenizer)
  _copy_tokenizer(tokenizer, rows / TOKENIZER_DIRECTORY)
  manifest = _manifest(wanted, corpus.tokenizer, parts, planned, splits)
  manifest.write(rows)
  os.rename(rows, out)
  log(f"written    {out}")
  return manifest


@dataclasses.dataclass(frozen=True)
class _StoredTokenizer:
  """How a process of its own finds the tokenizer."""

  name: str
  fingerprint: str

  def load(self) -> Tokenizer:
    tokenizer = _load_tokenizer(self)
    if tokenizer.fingerprint != self.fingerprint:
      raise ConfigError(f"tokenizer {self.name} was changed since the start.")
    return tokenizer


@functools.lru_cache(maxsize=1)
def _load_tokenizer(stored: _StoredTokenizer) -> Tokenizer:
  return get_tokenizer(stored.name)


@dataclasses.dataclass(frozen=True)
class _Hash:
  part: Part

  def run(self, tick: Tick) -> str:
    return self.part.sha256()


@dataclasses.dataclass(frozen=True)
class _Encode:
  part: Part
  reading: Reading
  tokenizer: _StoredTokenizer
  directory: str

  def run(self, tick: Tick) -> EncodedPart:
    return encode_part(
      self.part,
      reading=self.reading,
      tokenizer=self.tokenizer.load(),
      directory=self.directory,
      tick=tick,
    )


@dataclasses.dataclass(frozen=True)
class _WriteShard:
  """Writes the rows of a shard, and beside it what is known of them."""

  shard: PlannedShard
  sequence_length: int
  tokenizer: _StoredTokenizer
  directory: str
  done: str

  def run(self, tick: Tick) -> Shard:
    shard = self.shard
    name = shard_name(shard.split, shard.number, shard.count)
    known = Path(self.done, name)
    if known.is_file():
      fields = json.loads(known.read_text())
      return Shard(**fields | {"digest": bytes.fromhex(fields["digest"])})
    file = Path(self.directory, name)
    written = write_shard(file, self._rows(tick))
    assert written.num_rows == shard.num_rows, (name, written)
    fields = dataclasses.asdict(written) | {"digest": written.digest.hex()}
    temporary = known.with_suffix(".tmp")
    temporary.write_text(json.dumps(fields))
    os.rename(temporary, known)
    return written

  def _rows(self, tick: Tick) -> Iterator[PackedRow]:
    tokenizer = self.tokenizer.load()
    skip, documents = shard_documents(self.shard, token_dtype(tokenizer))
    packer = Packer(tokenizer, self.sequence_length, skip=skip)
    rows = pack_rows(packer, documents)
    started = tokens = 0
    for k in range(self.shard.num_rows):
      row = next(rows)
      yield row
      started += len(row.starts)
      tokens += len(row.tokens)
      if tokens >= _TOKENS_BETWEEN_TICKS or k == self.shard.num_rows - 1:
        tick(started, tokens)
        started = tokens = 0


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


def _scratch_of(out: Path) -> Path:
  return out.with_name(out.name + ".partial")


@contextlib.contextmanager
def _scratch(out: Path) -> Iterator[Path]:
  """The directory of what is not finished: ours alone; goes when all is done.

  It stays when something is raised.
  """
  scratch = _scratch_of(out)
  if scratch.exists() and not (scratch / _LOCK).exists():
    raise ConfigError(f"{scratch} holds something else; remove it.")
  try:
    (scratch / "parts").mkdir(parents=True, exist_ok=True)
    lock = open(scratch / _LOCK, "a")  # noqa: SIM115 (closed below)
  except OSError as error:
    raise ConfigError(f"{scratch} cannot be written: {error}.") from None
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise ConfigError(f"another process is preparing {out} now.") from None
    for left in (scratch / "parts").glob(".*"):
      shutil.rmtree(left, ignore_errors=True)
    yield scratch
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
