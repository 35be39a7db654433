"""Packing: many documents, one row of T+1 tokens at a time, nothing lost.

Every document becomes bos + tokens + eos; all of them, one behind the other,
are cut into disjoint rows. A row holds T+1 tokens, because T inputs need T
targets and the last target is one token further on. Needs numpy only.

Shapes: B batch, T sequence; `_T1` is T+1.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import hashlib
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from deltajax.data.tokenizers import Tokenizer
from deltajax.routing.validation import ConfigError

Array = TypeVar("Array")  # numpy or jax


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


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
  """The smallest unsigned type that holds every id."""
  return np.min_scalar_type(tokenizer.vocab_size - 1)


class Packer:
  """Makes rows of documents that come one by one; holds less than a row."""

  def __init__(self, tokenizer: Tokenizer, sequence_length: int):
    """Starts with no document.

    Args:
      tokenizer: gives bos_id, eos_id, pad_id and vocab_size.
      sequence_length: T, the number of inputs (and of targets) in a row.

    Raises:
      ConfigError: a sequence length below 1.
    """
    if sequence_length < 1:
      raise ConfigError(
        f"sequence_length must be at least 1, got {sequence_length}."
      )
    self._tokenizer = tokenizer
    self._width = sequence_length + 1
    self._dtype = token_dtype(tokenizer).newbyteorder("<")
    self._open = np.zeros(0, self._dtype)
    self._open_starts = np.zeros(0, np.int64)
    self._num_tokens = self._num_documents = 0
    self._digest = hashlib.sha256(
      f"{self._dtype.str} {sequence_length} {tokenizer.pad_id} ".encode()
    )

  def add(self, document: np.ndarray) -> Iterator[PackedRow]:
    """Yields the rows that a document fills; must be used up.

    Args:
      document: 1-D integer ids, without bos and eos.

    Raises:
      ConfigError: an id outside the vocabulary.
    """
    tokenizer = self._tokenizer
    ids = _checked_ids(document, self._num_documents, tokenizer.vocab_size)
    ends = np.array([tokenizer.bos_id, tokenizer.eos_id], self._dtype)
    tokens = np.concatenate(
      [self._open, ends[:1], ids.astype(self._dtype), ends[1:]]
    )
    starts = np.append(self._open_starts, self._open.size)
    self._num_documents += 1
    self._num_tokens += ids.size + 2
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

  def info(self) -> PackingInfo:
    """Of all rows that were made."""
    return PackingInfo(
      sequence_length=self._width - 1,
      pad_id=self._tokenizer.pad_id,
      num_tokens=self._num_tokens,
      num_documents=self._num_documents,
      fingerprint=self._digest.hexdigest(),
    )

  def _row(
    self, tokens: np.ndarray, starts: np.ndarray, begin: int
  ) -> PackedRow:
    end = min(begin + self._width, tokens.size)
    low, high = np.searchsorted(starts, [begin, end])
    row = PackedRow(tokens[begin:end], (starts[low:high] - begin).astype("<i4"))
    # The number of starts first: the bytes can be read in one way only.
    self._digest.update(len(row.starts).to_bytes(4, "little"))
    self._digest.update(row.starts.tobytes())
    self._digest.update(row.tokens.tobytes())
    return row


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
      info: its info.

    Raises:
      ConfigError: no tokens, or fewer tokens than one row.
    """
    if info.num_tokens == 2 * info.num_documents:
      raise ConfigError(
        f"the corpus is empty: {info.num_documents} documents without a single"
        " token."
      )
    if info.num_tokens < info.sequence_length + 1:
      raise ConfigError(
        f"the corpus has {info.num_tokens} tokens, fewer than one row of "
        f"sequence_length + 1 = {info.sequence_length + 1}; use a "
        f"sequence_length of at most {info.num_tokens - 1}, or a larger corpus."
      )
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
    rows = [row for document in documents for row in packer.add(document)]
    rows += packer.finish()
    return cls(rows, packer.info())

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


def _checked_ids(
  document: np.ndarray, index: int, vocab_size: int
) -> np.ndarray:
  """Returns `document` as a 1-D integer array of ids in the vocabulary."""
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
