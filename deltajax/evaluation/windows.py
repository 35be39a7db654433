"""Documents to windows: every token is predicted once, with enough context.

Needs numpy only.

Shapes: B batch, T sequence, W tokens of a window.
"""

from collections.abc import Iterable, Iterator
import dataclasses
from typing import NamedTuple

import numpy as np

from deltajax.routing.validation import ConfigError


class Window(NamedTuple):
  """A part of a document that a model sees at once.

  Tokens [begin, end) are its inputs, and [begin + 1, end + 1) its targets.

  Attributes:
    begin: the first input.
    first: the first target that counts; those before are context.
    end: the last target.
  """

  begin: int
  first: int
  end: int


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
  """Yields windows in which every token but the first is predicted once.

  Each takes the next `stride` tokens (the first window `context` of them, the
  last what is left), and, as far as there are any, enough tokens before them
  for `context` inputs. With a stride of `context` these are the rolling windows
  of lm-eval.

  Args:
    length: tokens of the document.
    context: inputs of a window at most.
    stride: tokens that count in a window at most, but for the first.
  """
  done, end = 0, min(length - 1, context)
  while done < end:
    yield Window(max(end - context, 0), done + 1, end)
    done, end = end, min(end + stride, length - 1)


def check_windows(context: int, stride: int) -> None:
  """Raises ConfigError unless windows can be made."""
  if context < 1:
    raise ConfigError(f"the context is {context} tokens; at least 1.")
  if not 1 <= stride <= context:
    raise ConfigError(
      f"the stride is {stride} and the context {context}; a stride is from 1 to"
      " the context, or tokens would be left out."
    )


@dataclasses.dataclass(frozen=True)
class WindowBatch:
  """Windows in rows of one length, several in a row if there is room.

  Attributes:
    inputs: int32 arrays [B, T]: `tokens`, `segment_ids`, 0 for padding, and
      `positions` within the window.
    targets_BxT: what is to be predicted.
    counts_BxT: which of these count.
    documents_BxT: the number of the document that a token is from.
  """

  inputs: dict[str, np.ndarray]
  targets_BxT: np.ndarray
  counts_BxT: np.ndarray
  documents_BxT: np.ndarray


def window_batches(
  documents: Iterable[np.ndarray],
  *,
  context: int,
  stride: int,
  batch_size: int,
) -> Iterator[WindowBatch]:
  """Yields the windows of documents, in order, in batches of one shape.

  Args:
    documents: token ids of each, the first of which is only an input.
    context: T.
    stride: see `windows`.
    batch_size: B.
  """
  check_windows(context, stride)
  rows = _Rows(batch_size, context)
  for number, tokens in enumerate(documents):
    for window in windows(len(tokens), context, stride):
      if not rows.fits(window):
        if rows.full:
          yield rows.batch()
          rows = _Rows(batch_size, context)
        rows.next_row()
      rows.put(tokens, window, number)
  if rows.used:
    yield rows.batch()


class _Rows:
  """A batch that is being filled."""

  def __init__(self, batch_size: int, context: int):
    shape = (batch_size, context)
    names = ("tokens", "segment_ids", "positions", "targets", "documents")
    self._arrays = {name: np.zeros(shape, np.int32) for name in names}
    self._counts_BxT = np.zeros(shape, bool)
    self._row = self._at = self._segment = 0
    self._shape = shape

  @property
  def used(self) -> bool:
    return bool(self._row or self._at)

  @property
  def full(self) -> bool:
    """Whether there is no other row."""
    return self._row + 1 == self._shape[0]

  def fits(self, window: Window) -> bool:
    return self._at + window.end - window.begin <= self._shape[1]

  def next_row(self) -> None:
    # Nothing to do for a batch that was just begun.
    if self.used:
      self._row, self._at, self._segment = self._row + 1, 0, 0

  def put(self, tokens: np.ndarray, window: Window, number: int) -> None:
    size = window.end - window.begin
    place = (self._row, slice(self._at, self._at + size))
    self._segment += 1
    values: dict[str, np.ndarray | int] = {
      "tokens": tokens[window.begin : window.end],
      "segment_ids": self._segment,
      "positions": np.arange(size),
      "targets": tokens[window.begin + 1 : window.end + 1],
      "documents": number,
    }
    for name, value in values.items():
      self._arrays[name][place] = value
    first = self._at + window.first - window.begin - 1
    self._counts_BxT[self._row, first : self._at + size] = True
    self._at += size

  def batch(self) -> WindowBatch:
    arrays = dict(self._arrays)
    targets_BxT, documents_BxT = arrays.pop("targets"), arrays.pop("documents")
    return WindowBatch(arrays, targets_BxT, self._counts_BxT, documents_BxT)
