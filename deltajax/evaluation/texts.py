"""Texts that a model is evaluated on, opened and checked before any work."""

import abc
from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np

from deltajax.config import ConfigError, DataConfig
from deltajax.data import storage
from deltajax.data.packed_dataset import packed_length
from deltajax.data.pipeline import (
  ALL,
  fixed_batches,
  is_path,
  is_text,
  load_mixture,
  Mixture,
)
from deltajax.data.records import Reading, Tally
from deltajax.data.sources import check_part, find_parts, Part, read_documents
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.evaluation.estimates import Quality
from deltajax.evaluation.perplexity import (
  limited,
  score_documents,
  score_rows,
)
from deltajax.evaluation.scoring import Scorer
from deltajax.evaluation.windows import check_windows
from deltajax.files import digest_of


@dataclasses.dataclass(frozen=True)
class Rows:
  """Covers text as validation does: packed rows, cut where they are full.

  Attributes:
    count: rows that are read; None for all.
  """

  count: int | None = None

  def __post_init__(self) -> None:
    if self.count is not None and self.count < 1:
      raise ConfigError(f"the number of rows is {self.count}; at least 1.")


@dataclasses.dataclass(frozen=True)
class Strides:
  """Covers text document by document; see `windows`.

  Attributes:
    context: inputs of a window at most.
    stride: tokens that count in each.
    max_tokens: to be predicted; None for all.
  """

  context: int
  stride: int
  max_tokens: int | None = None

  def __post_init__(self) -> None:
    check_windows(self.context, self.stride)
    if self.max_tokens is not None and self.max_tokens < 1:
      raise ConfigError(f"max_tokens is {self.max_tokens}; at least 1.")


@dataclasses.dataclass(frozen=True)
class Text(abc.ABC):
  """Text of one source, and how it is covered.

  Attributes:
    config: where it comes from.
    split: of the data sets.
    coverage: of the text.
    tokenizer: of the text.
  """

  config: DataConfig
  split: str
  coverage: Rows | Strides
  tokenizer: Tokenizer

  @property
  def length(self) -> int:
    """T, tokens that a model sees at once."""
    if isinstance(self.coverage, Strides):
      return self.coverage.context
    return self.config.sequence_length

  @property
  def unit(self) -> str:
    """What the standard error takes as independent."""
    return "row" if isinstance(self.coverage, Rows) else "document"

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Of all text of the split, and how it is encoded."""

  def __str__(self) -> str:
    return f"{' and '.join(self.config.datasets)}, split {self.split}"

  @abc.abstractmethod
  def score(self, scorer: Scorer, params: Any, batch_size: int) -> Quality:
    """How well a model predicts it."""

  def described(self) -> dict[str, Any]:
    """For the file of results."""
    coverage = self.coverage
    return {
      "data": {
        "datasets": list(self.config.datasets),
        "split": self.split,
        "tokenizer": self.config.tokenizer,
        "tokenizer_fingerprint": self.tokenizer.fingerprint,
        "fingerprint": self.fingerprint,
      },
      "coverage": "rows" if isinstance(coverage, Rows) else "windows",
      "context": self.length,
      "stride": getattr(coverage, "stride", None),
      "unit": self.unit,
    }


@dataclasses.dataclass(frozen=True)
class PackedText(Text):
  """A split of data sets in packed rows.

  Attributes:
    mixture: the rows.
  """

  mixture: Mixture

  @property
  def fingerprint(self) -> str:
    """As that of a run's data."""
    return self.mixture.info.fingerprint

  def __str__(self) -> str:
    total = len(self.mixture)
    if isinstance(self.coverage, Strides):
      return super().__str__()
    rows = sum(self.mixture.chosen(self.coverage.count))
    return f"{super().__str__()}: {rows:,} of {total:,} rows"

  def score(self, scorer: Scorer, params: Any, batch_size: int) -> Quality:
    """See `Text`."""
    bytes_V = np.asarray(self.tokenizer.bytes_per_token)
    if isinstance(self.coverage, Strides):
      documents = (x for s in self.mixture.sources for x in s.documents())
      return _score_strides(
        self.coverage, scorer, params, documents, bytes_V, batch_size
      )
    batches = fixed_batches(
      self.mixture, batch_size=batch_size, num_rows=self.coverage.count
    )
    return score_rows(scorer, params, batches, bytes_V)


@dataclasses.dataclass(frozen=True)
class TextFiles(Text):
  """Files of text, read as they are; nothing is written.

  Attributes:
    parts: what is read.
  """

  parts: tuple[Part, ...]

  @property
  def fingerprint(self) -> str:
    """Of the files and the tokenizer."""
    files = [part.sha256() for part in self.parts]
    return digest_of([files, self.tokenizer.fingerprint])

  def score(self, scorer: Scorer, params: Any, batch_size: int) -> Quality:
    """See `Text`."""
    assert isinstance(self.coverage, Strides)
    bytes_V = np.asarray(self.tokenizer.bytes_per_token)
    return _score_strides(
      self.coverage, scorer, params, self._documents(), bytes_V, batch_size
    )

  def _documents(self) -> Iterator[np.ndarray]:
    ends = np.array([self.tokenizer.bos_id, self.tokenizer.eos_id], np.int32)
    empty = True
    for part in self.parts:
      for text in read_documents(part, Reading(), Tally()):
        ids = self.tokenizer.encode(text)
        empty = empty and not len(ids)
        yield np.concatenate([ends[:1], ids, ends[1:]])
    if empty:
      raise ConfigError(
        f"there is no text in {' '.join(self.config.datasets)}."
      )


def _score_strides(
  coverage, scorer, params, documents, bytes_V, batch_size
) -> Quality:
  return score_documents(
    scorer,
    params,
    limited(documents, coverage.max_tokens),
    bytes_V,
    context=coverage.context,
    stride=coverage.stride,
    batch_size=batch_size,
  )


def open_text(
  config: DataConfig, split: str | None, coverage: Rows | Strides
) -> Text:
  """Finds a text, and prepares it where that is needed.

  Args:
    config: where it comes from; `sequence_length` is that of rows that have to
      be packed.
    split: of the data sets; None: `validation`, and `all` of files of text.
    coverage: of the text.

  Raises:
    ConfigError: as `load_mixture`, and for files that cannot be read.
  """
  tokenizer = get_tokenizer(config.tokenizer)
  texts = [is_text(name) for name in config.datasets]
  if split is None:
    split = ALL if all(texts) else "validation"
  if isinstance(coverage, Strides) and all(texts) and split == ALL:
    parts = tuple(find_parts(config.datasets))
    for part in parts:
      check_part(part, Reading())
    return TextFiles(config, split, coverage, tokenizer, parts)
  mixture = load_mixture(config, split)
  if isinstance(coverage, Rows):
    mixture.chosen(coverage.count)  # Raises for fewer than one of each.
  return PackedText(config, split, coverage, tokenizer, mixture)


def own_length(dataset: str) -> int | None:
  """The sequence length that a data set is packed for; None if it is not."""
  if not is_path(dataset) or not storage.is_dataset(dataset):
    return None
  return packed_length(dataset)
