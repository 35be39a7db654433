"""Tokenizers: what turns the text of a document into token ids and back.

Built in are those that need numpy only; they satisfy `Tokenizer` and have a row
in `TOKENIZERS`. Those of pretrained models are files: see `tokenizer_file`.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
import os
from typing import Protocol, runtime_checkable

import numpy as np

from deltajax.data.tokenizer_file import FileTokenizer
from deltajax.routing.validation import ConfigError, unknown_name


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
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a text that is generated."""

  @property
  def bytes_per_token(self) -> np.ndarray:
    """[V] integers: UTF-8 bytes that each id stands for, 0 for specials."""

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of `text`, int32, without special ids."""

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns what `encode` does for each text, sooner if it can."""

  def encode_prompt(self, text: str) -> np.ndarray:
    """Returns the ids of a text to be continued, int32."""

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of `ids`, special ids skipped."""


class ByteTokenizer:
  """One id per UTF-8 byte, and three special ids behind them."""

  bos_id = 256
  eos_id = 257
  pad_id = 258
  vocab_size = 259
  fingerprint = "bytes"
  stop_ids = (eos_id,)

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

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text."""
    return [self.encode(text) for text in texts]

  def encode_prompt(self, text: str) -> np.ndarray:
    """As `encode`: a prompt may begin anywhere in a document."""
    return self.encode(text)

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
    name: a key of `TOKENIZERS`, or the path (with a "/") of a tokenizer.json or
      of the directory that holds one.

  Raises:
    ConfigError: there is no such tokenizer; names the valid ones.
  """
  if name in TOKENIZERS:
    return TOKENIZERS[name]()
  if "/" in name or os.sep in name:
    return FileTokenizer(name)
  raise ConfigError(
    unknown_name("tokenizer", name, TOKENIZERS)
    + " A tokenizer.json is given as a path with a '/'."
  )


def check_vocabulary(
  tokenizer: Tokenizer, vocab_size: int, name: str = "model.vocab_size"
) -> None:
  """Raises ConfigError if a tokenizer has ids that a model has not.

  Args:
    tokenizer: whose ids the model is given.
    vocab_size: of the model.
    name: what messages call that.
  """
  if tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      f"{name} is {vocab_size}, but the tokenizer has {tokenizer.vocab_size}"
      " ids; use at least that, or the tokenizer that belongs to the model."
    )


# What decoders put where bytes are not UTF-8, or not yet.
_UNKNOWN = "\ufffd"
_WINDOW = 64
# Bytes, and so ids, of a character that is not whole.
_PARTIAL = 3


class TextStream:
  """The text of ids that come one at a time.

  Bytes of a character that is not whole yet are held back, up to three. What
  was returned stays: a tokenizer that would decode it differently with more
  ids is not asked again.
  """

  def __init__(self, tokenizer: Tokenizer):
    """Starts with no text."""
    self._tokenizer = tokenizer
    self._ids: list[int] = []
    self._shown = ""
    self._pending = 0  # Ids since the text ended with a whole character.
    self._whole_at = 0

  def push(self, token_id: int) -> str:
    """Takes one id; returns the text that it makes known, maybe none."""
    self._ids.append(token_id)
    text = self._tokenizer.decode(self._ids)
    whole = text.rstrip(_UNKNOWN)
    self._pending = 0 if whole == text else self._pending + 1
    if self._pending > _PARTIAL:
      # More than one character can lack: they are what they are.
      whole = text[: max(len(whole), len(text) - _PARTIAL)]
    new = self._show(whole)
    if whole == text:
      if len(self._ids) >= _WINDOW:
        # A character stays: how ids decode may depend on those before them.
        self._ids = self._ids[self._whole_at :]
        self._shown = self._tokenizer.decode(self._ids)
      self._whole_at = len(self._ids)
    return new

  def end(self) -> str:
    """Returns what was held back."""
    return self._show(self._tokenizer.decode(self._ids))

  def _show(self, text: str) -> str:
    new = text[len(self._shown) :]
    self._shown = text if new else self._shown
    return new
