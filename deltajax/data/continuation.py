"""The texts of prompts that a model continues, token by token.

Shapes: B prompts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from deltajax.data.tokenizers import TextStream, Tokenizer


class Continuation:
  """The new text of one prompt.

  Attributes:
    done: whether it has ended.
  """

  def __init__(
    self, tokenizer: Tokenizer, stop: Sequence[str], max_tokens: int
  ):
    """Starts with no text.

    Args:
      tokenizer: of the model.
      stop: texts that end it.
      max_tokens: after which it ends.
    """
    self._stream = TextStream(tokenizer)
    self._stop_ids = frozenset(tokenizer.stop_ids)
    self._stop = stop
    self._left = max_tokens
    self._held = ""
    self.done = False

  def push(self, token_id: int) -> str:
    """Takes a token; returns the text that is sure to stay."""
    if self.done:
      return ""
    self._left -= 1
    ends = token_id in self._stop_ids or not self._left
    if token_id not in self._stop_ids:
      self._held += self._stream.push(token_id)
    if ends:
      self._held += self._stream.end()
    found = [self._held.find(text) for text in self._stop]
    first = min((i for i in found if i >= 0), default=None)
    self.done = ends or first is not None
    size = first
    if first is None:
      size = len(self._held) - (0 if self.done else self._begun())
    shown, self._held = self._held[:size], self._held[size:]
    return shown

  def _begun(self) -> int:
    """Characters at the end that may be the beginning of a stop text."""
    return max(
      (
        size
        for text in self._stop
        for size in range(1, len(text))
        if self._held.endswith(text[:size])
      ),
      default=0,
    )


def continue_texts(
  steps: Iterator[Any], continuations: Sequence[Continuation]
) -> Iterator[list[str]]:
  """Yields what each text gains with each token, until all have ended."""
  for token_B in steps:
    pairs = zip(continuations, np.asarray(token_B).tolist(), strict=True)
    yield [row.push(token_id) for row, token_id in pairs]
    if all(row.done for row in continuations):
      return
