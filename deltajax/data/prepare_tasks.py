"""What the processes of a preparation do; see `prepare`."""

from collections.abc import Iterator
import dataclasses
import functools
import json
from pathlib import Path

from deltajax.data.encoding import encode_part, EncodedPart
from deltajax.data.packed_dataset import Shard, shard_name, write_shard
from deltajax.data.packing import pack_rows, PackedRow, Packer, token_dtype
from deltajax.data.records import Reading
from deltajax.data.sources import Part
from deltajax.data.split_plan import PlannedShard, shard_documents
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.data.workers import Tick
from deltajax.files import flush, write_file
from deltajax.routing.validation import ConfigError

_TOKENS_BETWEEN_TICKS = 2**20


@dataclasses.dataclass(frozen=True)
class StoredTokenizer:
  """How a process of its own finds the tokenizer."""

  name: str
  fingerprint: str

  def load(self) -> Tokenizer:
    """Returns it; once a process, as long as it is one and the same."""
    tokenizer = _load_tokenizer(self)
    if tokenizer.fingerprint != self.fingerprint:
      raise ConfigError(f"tokenizer {self.name} was changed since the start.")
    return tokenizer


@functools.lru_cache(maxsize=1)
def _load_tokenizer(stored: StoredTokenizer) -> Tokenizer:
  return get_tokenizer(stored.name)


@dataclasses.dataclass(frozen=True)
class Hash:
  """Says what a part holds."""

  part: Part

  def run(self, tick: Tick) -> str:
    """Returns its sha256."""
    return self.part.sha256()


@dataclasses.dataclass(frozen=True)
class Encode:
  """Encodes a part."""

  part: Part
  reading: Reading
  tokenizer: StoredTokenizer
  directory: str

  def run(self, tick: Tick) -> EncodedPart:
    """Returns what is on disk; see `encode_part`."""
    return encode_part(
      self.part,
      reading=self.reading,
      tokenizer=self.tokenizer.load(),
      directory=self.directory,
      tick=tick,
    )


@dataclasses.dataclass(frozen=True)
class WriteShard:
  """Writes the rows of a shard, and elsewhere what is known of them.

  Attributes:
    shard: which.
    sequence_length: T.
    tokenizer: of the documents.
    directory: of the rows.
    done: where finished shards are written down.
  """

  shard: PlannedShard
  sequence_length: int
  tokenizer: StoredTokenizer
  directory: str
  done: str

  def run(self, tick: Tick) -> Shard:
    """Returns what is on disk, as it is if it was finished before."""
    shard = self.shard
    name = shard_name(shard.split, shard.number, shard.count)
    known, file = Path(self.done, name), Path(self.directory, name)
    if known.is_file():
      fields = json.loads(known.read_text())
      size, digest = fields.pop("size"), bytes.fromhex(fields.pop("digest"))
      if file.is_file() and file.stat().st_size == size:
        return Shard(**fields, digest=digest)
    written = write_shard(file, self._rows(tick))
    assert written.num_rows == shard.num_rows, (name, written)
    flush(file)  # Notes must not reach the disk before what they note.
    fields = dataclasses.asdict(written) | {"digest": written.digest.hex()}
    write_file(known, json.dumps({**fields, "size": file.stat().st_size}))
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
