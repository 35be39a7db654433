"""Tokenizers: what turns the text of a document into token ids and back.

Needs numpy only. A new tokenizer satisfies `Tokenizer` and gets a row in
`TOKENIZERS`.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from deltajax.routing.validation import check_name, ConfigError


@runtime_checkable
class Tokenizer(Protocol):
  """What packing, training and generation ask of a tokenizer."""

  @property
  def bos_id(self) -> int:
    """The id that starts every document."""

  @property
  def eos_id(self) -> int:
    """The id that ends every document."""

  @property
  def pad_id(self) -> int:
    """The id of positions that hold nothing."""

  @property
  def vocab_size(self) -> int:
    """One more than the largest id, special ids included."""

  @property
  def fingerprint(self) -> str:
    """What decides how text is encoded, for comparison; any short string."""

  @property
  def bytes_per_token(self) -> np.ndarray:
    """[V] integers: UTF-8 bytes that each id stands for, 0 for specials."""

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of `text`, int32, without special ids."""

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of `ids`, special ids skipped."""


class ByteTokenizer:
  """One id per UTF-8 byte, and three special ids behind them."""

  bos_id = 256
  eos_id = 257
  pad_id = 258
  vocab_size = 259
  fingerprint = "bytes"

  @property
  def bytes_per_token(self) -> np.ndarray:
    """[V] int32: 1 for the bytes, 0 for the special ids."""
    return (np.arange(self.vocab_size) < 256).astype(np.int32)

  def encode(self, text: str) -> np.ndarray:
    """Returns the UTF-8 bytes of `text` as ids, without special ids.

    Args:
      text: any string; what UTF-8 cannot express (lone surrogates) becomes "?".

    Returns:
      int32 ids, one per byte.
    """
    raw = text.encode("utf-8", errors="replace")
    return np.frombuffer(raw, np.uint8).astype(np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of `ids`; special ids are skipped.

    Args:
      ids: 1-D integers in [0, V), for example what a model generated. Byte
        sequences that are not UTF-8 become U+FFFD.

    Returns:
      The text.

    Raises:
      ConfigError: an id is outside the vocabulary.
    """
    ids = np.asarray(ids)
    if ids.size == 0:
      return ""
    bad = ids[(ids < 0) | (ids >= self.vocab_size)]
    if bad.size:
      raise ConfigError(
        f"token id {bad[0]} is outside the vocabulary of the byte tokenizer: "
        f"ids are 0 to {self.vocab_size - 1}."
      )
    raw = ids[ids < 256].astype(np.uint8).tobytes()
    return raw.decode("utf-8", errors="replace")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
  """Returns the tokenizer that a configuration names.

  Args:
    name: a key of `TOKENIZERS`.

  Raises:
    ConfigError: there is no such tokenizer; names the valid ones.
  """
  check_name("tokenizer", name, TOKENIZERS)
  return TOKENIZERS[name]()
