"""Packing: many documents, one row of T+1 tokens at a time, nothing lost.

Every document becomes bos + tokens + eos; all of them, one behind the other,
are cut into disjoint rows. A row holds T+1 tokens, because T inputs need T
targets and the last target is one token further on. Needs numpy only.

Shapes: B batch, T sequence; `_T1` is T+1.
"""

from collections.abc import Iterable
import functools
import hashlib
from typing import TypeVar

import numpy as np

from deltajax.data.tokenizers import Tokenizer
from deltajax.routing.validation import ConfigError

Array = TypeVar("Array")  # numpy or jax


class PackedSequences:
  """Random access to rows that hold every token of a corpus exactly once."""

  def __init__(
    self,
    documents: Iterable[np.ndarray],
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
  ):
    """Packs `documents`; keeps one small unsigned integer per token.

    Args:
      documents: 1-D integer ids, without bos and eos.
      tokenizer: gives bos_id, eos_id, pad_id and vocab_size.
      sequence_length: T, the number of inputs (and of targets) in a row.

    Raises:
      ConfigError: no tokens, fewer tokens than one row, an id outside the
        vocabulary, or a sequence length below 1.
    """
    if sequence_length < 1:
      raise ConfigError(
        f"sequence_length must be at least 1, got {sequence_length}."
      )
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    pieces = []
    for index, document in enumerate(documents):
      ids = _checked_ids(document, index, tokenizer.vocab_size)
      piece = np.empty(ids.size + 2, dtype)
      piece[0], piece[1:-1], piece[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
      pieces.append(piece)
    lengths = np.array([piece.size for piece in pieces], np.int64)
    num_tokens = int(lengths.sum())
    if num_tokens == 2 * len(pieces):
      raise ConfigError(
        f"the corpus is empty: {len(pieces)} documents without a single token."
      )
    if num_tokens < sequence_length + 1:
      raise ConfigError(
        f"the corpus has {num_tokens} tokens, fewer than one row of "
        f"sequence_length + 1 = {sequence_length + 1}; use a sequence_length "
        f"of at most {num_tokens - 1}, or a larger corpus."
      )
    self._tokens = np.concatenate(pieces)
    self._starts = np.cumsum(lengths) - lengths
    self._sequence_length = sequence_length
    self._pad_id = tokenizer.pad_id

  @property
  def sequence_length(self) -> int:
    """T: the number of inputs in a row, which has T+1 tokens."""
    return self._sequence_length

  @property
  def pad_id(self) -> int:
    """The id in the unused end of the last row."""
    return self._pad_id

  @property
  def num_tokens(self) -> int:
    """Tokens in the corpus: bos and eos counted, padding not."""
    return self._tokens.size

  @property
  def num_documents(self) -> int:
    """Documents in the corpus."""
    return self._starts.size

  @functools.cached_property
  def fingerprint(self) -> str:
    """sha256 (hex) over everything that decides what the rows hold."""
    tokens = self._tokens.astype(
      self._tokens.dtype.newbyteorder("<"), copy=False
    )
    starts = self._starts.astype("<i8")
    header = f"{tokens.dtype.str} {self._sequence_length} {self._pad_id} "
    digest = hashlib.sha256(header.encode())
    digest.update(starts.tobytes())
    digest.update(tokens.data)
    return digest.hexdigest()

  def __len__(self) -> int:
    return -(-self._tokens.size // (self._sequence_length + 1))

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
    width = self._sequence_length + 1
    begin = int(k) * width
    end = min(begin + width, self._tokens.size)
    used = end - begin
    # Only documents that start after the first token begin a new piece; the
    # first token begins one in any case.
    low, high = np.searchsorted(self._starts, [begin + 1, end])
    starts_piece = np.zeros(used, bool)
    starts_piece[self._starts[low:high] - begin] = True
    offsets = np.arange(used)
    piece_begin = np.maximum.accumulate(np.where(starts_piece, offsets, 0))

    tokens_T1 = np.full(width, self._pad_id, np.int32)
    segment_ids_T1 = np.zeros(width, np.int32)
    positions_T1 = np.zeros(width, np.int32)
    tokens_T1[:used] = self._tokens[begin:end]
    segment_ids_T1[:used] = np.cumsum(starts_piece) + 1
    positions_T1[:used] = offsets - piece_begin
    return {
      "tokens": tokens_T1,
      "segment_ids": segment_ids_T1,
      "positions": positions_T1,
    }

  def __repr__(self) -> str:
    return (
      f"PackedSequences({len(self)} rows, T={self.sequence_length}, "
      f"{self.num_tokens} tokens, {self.num_documents} documents)"
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
