"""Packing: many documents, one row of T+1 tokens at a time, nothing lost.

Every document becomes bos + tokens + eos; all of them, one behind the other,
are cut into disjoint rows. A row holds T+1 tokens, because T inputs need T
targets and the last target is one token further on. Needs numpy only.

Shapes: B batch, T sequence; `_T1` is T+1.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import hashlib
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from deltajax.data.tokenizers import Tokenizer
from deltajax.routing.validation import ConfigError

Array = TypeVar("Array")  # numpy or jax

# Rows: tokens, segment_ids and positions, each int32 [B, T+1].
Batch = Mapping[str, Any]

TOKENS_PER_SHARD = 2**26


class PackedRow(NamedTuple):
  """A row as it is stored.

  Attributes:
    tokens: [n] the smallest unsigned type that holds the vocabulary; n = T+1,
      or less in the last row.
    starts: [m] int32, ascending offsets at which a document begins.
  """

  tokens: np.ndarray
  starts: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackingInfo:
  """What is known of a packed corpus without reading its rows.

  Attributes:
    sequence_length: T.
    pad_id: the id in the unused end of the last row.
    num_tokens: bos and eos counted, padding not.
    num_documents: documents, empty ones counted.
    fingerprint: sha256 (hex) over everything that decides what the rows hold.
  """

  sequence_length: int
  pad_id: int
  num_tokens: int
  num_documents: int
  fingerprint: str

  @property
  def num_rows(self) -> int:
    """Rows that hold `num_tokens`."""
    return -(-self.num_tokens // (self.sequence_length + 1))

  @property
  def fills_a_row(self) -> bool:
    """Whether there is any text, and one row of it; see `check_fills_a_row`."""
    return self.num_tokens > max(self.sequence_length, 2 * self.num_documents)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
  """The smallest unsigned type that holds every id, little-endian."""
  return np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")


def rows_per_shard(sequence_length: int) -> int:
  """Rows that are stored in one file, and hashed in one go."""
  return max(1, TOKENS_PER_SHARD // (sequence_length + 1))


def shard_digest(rows: Iterable[PackedRow]) -> bytes:
  """sha256 of the rows of one shard."""
  digest = hashlib.sha256()
  for row in rows:
    # The number of starts first: the bytes can be read in one way only.
    digest.update(len(row.starts).to_bytes(4, "little"))
    digest.update(row.starts.tobytes())
    digest.update(row.tokens.tobytes())
  return digest.digest()


def packing_info(
  tokenizer: Tokenizer,
  sequence_length: int,
  *,
  num_tokens: int,
  num_documents: int,
  shard_digests: Iterable[bytes],
) -> PackingInfo:
  """What is known of rows once all shards were made, by whomever."""
  kind = f"{token_dtype(tokenizer).str} {sequence_length} {tokenizer.pad_id} "
  return PackingInfo(
    sequence_length=sequence_length,
    pad_id=tokenizer.pad_id,
    num_tokens=num_tokens,
    num_documents=num_documents,
    fingerprint=hashlib.sha256(
      kind.encode() + b"".join(shard_digests)
    ).hexdigest(),
  )


class Packer:
  """Makes rows of documents that come one by one; holds less than a row.

  Attributes:
    num_tokens: of the documents so far, bos and eos counted.
    num_documents: so far.
  """

  def __init__(
    self, tokenizer: Tokenizer, sequence_length: int, *, skip: int = 0
  ):
    """Starts with no document.

    Args:
      tokenizer: gives bos_id, eos_id, pad_id and vocab_size.
      sequence_length: T, the number of inputs (and of targets) in a row.
      skip: tokens that other rows hold: the first row begins after them.

    Raises:
      ConfigError: a sequence length below 1.
    """
    if sequence_length < 1:
      raise ConfigError(
        f"sequence_length must be at least 1, got {sequence_length}."
      )
    self._tokenizer = tokenizer
    self._width = sequence_length + 1
    self._dtype = token_dtype(tokenizer)
    self._open = np.zeros(0, self._dtype)
    self._open_starts = np.zeros(0, np.int64)
    self._skip = skip
    self.num_tokens = self.num_documents = 0

  def add(self, document: np.ndarray) -> Iterator[PackedRow]:
    """Yields the rows that a document fills; must be used up.

    Args:
      document: 1-D integer ids, without bos and eos.

    Raises:
      ConfigError: an id outside the vocabulary.
    """
    tokenizer = self._tokenizer
    ids = checked_ids(document, self.num_documents, tokenizer.vocab_size)
    ends = np.array([tokenizer.bos_id, tokenizer.eos_id], self._dtype)
    tokens = np.concatenate(
      [self._open, ends[:1], ids.astype(self._dtype), ends[1:]]
    )
    starts = np.append(self._open_starts, self._open.size)
    self.num_documents += 1
    self.num_tokens += ids.size + 2
    if self._skip:
      skipped = min(self._skip, tokens.size)
      self._skip -= skipped
      tokens = tokens[skipped:]
      starts = starts[starts >= skipped] - skipped
    whole = tokens.size // self._width * self._width
    for begin in range(0, whole, self._width):
      yield self._row(tokens, starts, begin)
    self._open = tokens[whole:]
    self._open_starts = starts[starts >= whole] - whole

  def finish(self) -> Iterator[PackedRow]:
    """Yields the last, shorter row, if there is one; nothing comes after."""
    if self._open.size:
      yield self._row(self._open, self._open_starts, 0)
    self._open = self._open[:0]

  def _row(
    self, tokens: np.ndarray, starts: np.ndarray, begin: int
  ) -> PackedRow:
    end = min(begin + self._width, tokens.size)
    low, high = np.searchsorted(starts, [begin, end])
    return PackedRow(
      tokens[begin:end], (starts[low:high] - begin).astype("<i4")
    )


def pack_rows(
  packer: Packer, documents: Iterable[np.ndarray]
) -> Iterator[PackedRow]:
  """Yields all rows of some documents."""
  for document in documents:
    yield from packer.add(document)
  yield from packer.finish()


def check_fills_a_row(
  num_tokens: int, num_documents: int, sequence_length: int
) -> None:
  """Raises ConfigError if a corpus has no text, or less than one row of it.

  Args:
    num_tokens: bos and eos counted.
    num_documents: of the corpus.
    sequence_length: T.
  """
  if num_tokens == 2 * num_documents:
    raise ConfigError(
      f"the corpus is empty: {num_documents} documents without a single token."
    )
  if num_tokens < sequence_length + 1:
    raise ConfigError(
      f"the corpus has {num_tokens} tokens, fewer than one row of "
      f"sequence_length + 1 = {sequence_length + 1}; use a sequence_length of "
      f"at most {num_tokens - 1}, or a larger corpus."
    )


class PackedRows(Protocol):
  """Where rows are kept."""

  def __len__(self) -> int:
    """How many there are."""

  def __getitem__(self, k: int, /) -> PackedRow:
    """Row k."""


class PackedSequences:
  """Random access to rows that hold every token of a corpus exactly once."""

  def __init__(self, rows: PackedRows, info: PackingInfo):
    """Takes rows from wherever they are kept.

    Args:
      rows: what a `Packer` yielded; read when they are asked for.
      info: of these rows.

    Raises:
      ConfigError: no tokens, or fewer tokens than one row.
    """
    check_fills_a_row(info.num_tokens, info.num_documents, info.sequence_length)
    self._rows = rows
    self.info = info

  @classmethod
  def pack(
    cls,
    documents: Iterable[np.ndarray],
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
  ) -> "PackedSequences":
    """Packs `documents` in memory; see `Packer`."""
    packer = Packer(tokenizer, sequence_length)
    rows = list(pack_rows(packer, documents))
    size = rows_per_shard(sequence_length)
    info = packing_info(
      tokenizer,
      sequence_length,
      num_tokens=packer.num_tokens,
      num_documents=packer.num_documents,
      shard_digests=[
        shard_digest(rows[k : k + size]) for k in range(0, len(rows), size)
      ],
    )
    return cls(rows, info)

  def __len__(self) -> int:
    return self.info.num_rows

  def __getitem__(self, k: int) -> dict[str, np.ndarray]:
    """Returns row k: tokens [k*(T+1), (k+1)*(T+1)) of the corpus.

    Args:
      k: 0 <= k < len(self).

    Returns:
      Three int32 arrays [T+1]: `tokens`; `segment_ids`, which count the
      document pieces of the row from 1, with 0 for padding; `positions`,
      which restart at 0 with every piece (a document that goes on in the next
      row starts at 0 there, because it cannot attend to the row before).

    Raises:
      IndexError: k is out of range.
    """
    if not 0 <= k < len(self):
      raise IndexError(f"row {k} of {len(self)}")
    row = self._rows[int(k)]
    width, used = self.info.sequence_length + 1, row.tokens.size
    # A document that starts after the first token begins a new piece; the
    # first token begins one in any case.
    starts_piece = np.zeros(used, bool)
    starts_piece[row.starts] = True
    starts_piece[0] = False
    offsets = np.arange(used)
    piece_begin = np.maximum.accumulate(np.where(starts_piece, offsets, 0))

    tokens_T1 = np.full(width, self.info.pad_id, np.int32)
    segment_ids_T1 = np.zeros(width, np.int32)
    positions_T1 = np.zeros(width, np.int32)
    tokens_T1[:used] = row.tokens
    segment_ids_T1[:used] = np.cumsum(starts_piece) + 1
    positions_T1[:used] = offsets - piece_begin
    return {
      "tokens": tokens_T1,
      "segment_ids": segment_ids_T1,
      "positions": positions_T1,
    }

  def documents(self) -> Iterator[np.ndarray]:
    """Yields the tokens of every document, bos and eos included, in order.

    No more than one document and one row are in memory.
    """
    pieces: list[np.ndarray] = []
    for k in range(len(self)):
      row = self._rows[k]
      head, *begun = np.split(row.tokens, row.starts)
      pieces.append(head)
      for piece in begun:
        if any(part.size for part in pieces):
          yield np.concatenate(pieces).astype(np.int32)
        pieces = [piece]
    yield np.concatenate(pieces).astype(np.int32)

  def __repr__(self) -> str:
    info = self.info
    return (
      f"PackedSequences({len(self)} rows, T={info.sequence_length}, "
      f"{info.num_tokens} tokens, {info.num_documents} documents)"
    )


def target_mask(segment_ids_BxT1: Array) -> Array:
  """Returns which targets count: those in the document of their input.

  Args:
    segment_ids_BxT1: [B, T+1] integers, numpy or jax, 0 for padding.

  Returns:
    [B, T] booleans; entry j is about token j+1 as predicted from token j.
  """
  inputs, targets = segment_ids_BxT1[..., :-1], segment_ids_BxT1[..., 1:]  # type: ignore[index]
  return (inputs == targets) & (targets != 0)


def checked_ids(
  document: np.ndarray, index: int, vocab_size: int
) -> np.ndarray:
  """Returns `document` as a 1-D integer array of ids in the vocabulary.

  Args:
    document: what a tokenizer returned.
    index: its number, for messages.
    vocab_size: one more than the largest id.

  Raises:
    ConfigError: it is something else.
  """
  ids = np.asarray(document)
  if ids.size == 0:
    return np.zeros(0, np.int32)
  if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
    raise ConfigError(
      f"document {index} must be 1-D integers, got {ids.dtype} of shape "
      f"{ids.shape}."
    )
  low, high = ids.min(), ids.max()
  if low < 0 or high >= vocab_size:
    raise ConfigError(
      f"document {index} has token id {low if low < 0 else high}, outside the "
      f"vocabulary of {vocab_size} ids (0 to {vocab_size - 1})."
    )
  return ids
