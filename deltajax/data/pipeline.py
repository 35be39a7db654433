"""Batches: a stored split becomes rows, and rows become training batches.

Batch k of a training run is a pure function of (seed, k, data). Neither
threads nor the number of hosts have a say in it, so that a run can be
resumed anywhere.

Shapes: B batch, T sequence; `_T1` is T+1.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import os
from pathlib import Path

import grain
import numpy as np

from deltajax.config import DataConfig
from deltajax.data import mixing, storage
from deltajax.data.packed_dataset import (
  check_packed_for,
  has_rows,
  is_packed,
  open_packed,
  pack_texts,
  PACK_VERSION,
)
from deltajax.data.packing import Batch, PackedSequences, PackingInfo
from deltajax.data.prepare import Corpus, prepare
from deltajax.data.python_stdlib import PythonStdlib
from deltajax.data.sources import find_parts
from deltajax.data.split_plan import Fractions
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.files import digest_of, one_at_a_time
from deltajax.routing.validation import ConfigError, unknown_name

DATASETS = {PythonStdlib.name: PythonStdlib}

# Of the documents of files of text that a run prepares by itself.
_VALIDATION = 0.05
# The split of such files that holds all of them.
ALL = "all"
_SMALL_BYTES = 2**26

# From the seed of one data set to that of the next; the golden ratio.
_NEXT_SEED = 0x9E3779B9


def load_split(
  dataset: str,
  split: str,
  *,
  data_dir: str | os.PathLike[str],
  tokenizer: str,
  sequence_length: int,
) -> PackedSequences:
  """Returns a split as packed rows; makes what is missing on disk.

  Tokenising happens once for a data set, tokenizer and sequence length, here or
  by `train.prepare_data`; after that, rows are read when they are asked for.

  Args:
    dataset: a key of `DATASETS`, or a path (with a "/"): a TFDS directory that
      is packed, or whose records have a `text` feature, or files of text that
      `train.prepare_data` can read, or a directory of these.
    split: the name of the split; of files of text, which have `train` and
      `validation`, also `all`.
    data_dir: where data sets are kept.
    tokenizer: what to encode the documents with; see `get_tokenizer`.
    sequence_length: T.

  Raises:
    ConfigError: no such data set or split, not enough data for one row, or
      rows that were packed for another tokenizer or sequence length.
  """
  encoder = get_tokenizer(tokenizer)
  place = _Place(data_dir, tokenizer, encoder, sequence_length)
  whole = split == ALL and is_text(dataset)
  directory = place.stored(dataset, 0.0 if whole else _VALIDATION)
  split = "train" if whole else split
  storage.check_has(directory, "split", split, storage.split_names(directory))
  packed = place.packed(directory)
  try:
    return open_packed(packed, split)
  except ConfigError as error:
    raise ConfigError(f"split {split!r} of {dataset}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where data sets are kept, and how they are packed there."""

  data_dir: str | os.PathLike[str]
  tokenizer: str
  encoder: Tokenizer
  sequence_length: int

  def stored(self, dataset: str, validation: float = _VALIDATION) -> Path:
    """The TFDS directory of a data set, which is made if need be."""
    if is_text(dataset):
      return _prepared(
        Path(dataset).expanduser(),
        self.data_dir,
        self.tokenizer,
        self.encoder.fingerprint,
        self.sequence_length,
        Fractions(validation=validation, test=0.0),
      )
    if is_path(dataset):
      return Path(dataset).expanduser()
    if dataset in DATASETS:
      return storage.build_dataset(DATASETS[dataset], self.data_dir)
    raise ConfigError(
      unknown_name("dataset", dataset, DATASETS)
      + " A directory or file is given as a path with a '/'."
    )

  def packed(self, directory: Path) -> Path:
    """The directory of its rows, which is made if need be."""
    if not is_packed(directory):
      return pack_texts(
        directory,
        data_dir=self.data_dir,
        tokenizer=self.encoder,
        sequence_length=self.sequence_length,
      )
    check_packed_for(
      directory, tokenizer=self.encoder, sequence_length=self.sequence_length
    )
    return directory


def is_path(dataset: str) -> bool:
  """Whether a data set is given as a path, and not by its name."""
  return "/" in dataset or os.sep in dataset


def is_text(dataset: str) -> bool:
  """Whether a data set is files of text that are there."""
  path = Path(dataset).expanduser()
  return is_path(dataset) and path.exists() and not storage.is_dataset(path)


def _prepared(
  texts: Path,
  data_dir: str | os.PathLike[str],
  tokenizer: str,
  fingerprint: str,
  sequence_length: int,
  fractions: Fractions,
) -> Path:
  """Prepares files of text, unless they and all else are as they were."""
  corpus = Corpus(
    sources=(str(texts),),
    tokenizer=tokenizer,
    sequence_length=sequence_length,
    fractions=fractions,
  )
  files = [
    (path, os.stat(path).st_size, os.stat(path).st_mtime_ns)
    for part in find_parts(corpus.sources)
    for path in part.paths
  ]
  held_out = fractions.validation
  key = [PACK_VERSION, fingerprint, sequence_length, held_out, files]
  digest = digest_of(key)[:16]
  target = Path(data_dir).expanduser() / "prepared" / digest
  if storage.is_dataset(target):
    return target

  def waits() -> None:
    print(f"data      waiting: another process prepares {texts}", flush=True)

  lock = target.with_name(f".{digest}.lock")
  try:
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
  except OSError as error:
    raise ConfigError(f"{lock.parent} cannot be written: {error}.") from None
  with one_at_a_time(lock, waits):
    # By now another may have done it.
    if not storage.is_dataset(target):
      _prepare(corpus, target, sum(size for _, size, _ in files))
  return target


def _prepare(corpus: Corpus, target: Path, size: int) -> None:
  """Prepares files of text; nothing stays of what is refused.

  Args:
    corpus: the files.
    target: where to.
    size: of the files in bytes.
  """
  # Processes take longer to start than a small corpus to read.
  workers = 0 if size < _SMALL_BYTES else None
  prepare(
    corpus, target, workers=workers, log=lambda line: None, keep_refused=False
  )


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Data sets that are read together.

  Attributes:
    sources: the rows of each.
    weights: the share of all rows that each gives; sums to 1.
  """

  sources: tuple[PackedSequences, ...]
  weights: tuple[float, ...]

  @classmethod
  def create(
    cls, sources: Sequence[PackedSequences], weights: Sequence[float] = ()
  ) -> "Mixture":
    """A mixture; without weights, each gives in proportion to its rows."""
    if not weights:
      total = sum(map(len, sources))
      weights = [len(source) / total for source in sources]
    return cls(tuple(sources), tuple(weights))

  def __len__(self) -> int:
    return sum(map(len, self.sources))

  def chosen(self, num_rows: int | None) -> tuple[int, ...]:
    """How many rows of each data set are read where only some are.

    Args:
      num_rows: at most this many in all: of each data set its share, but at
        least one, and fewer where it is used up. None: every row of every one.

    Raises:
      ConfigError: there are more data sets than rows.
    """
    lengths = tuple(map(len, self.sources))
    if num_rows is None:
      return lengths
    _check_at_least("num_rows", num_rows, 1)
    if num_rows < len(lengths):
      raise ConfigError(
        f"num_rows is {num_rows}; {len(lengths)} data sets are read together,"
        " each of which gives at least one."
      )
    shares = [num_rows * weight for weight in self.weights]
    counts = [max(1, int(share)) for share in shares]
    while missing := num_rows - sum(counts):
      step = 1 if missing > 0 else -1
      lacks = [
        (share - count) * step if count + step else -math.inf
        for share, count in zip(shares, counts, strict=True)
      ]
      counts[lacks.index(max(lacks))] += step
    return tuple(map(min, counts, lengths))

  @property
  def info(self) -> PackingInfo:
    """Of all of them; the fingerprint is that of a lone one, or of all."""
    infos = [source.info for source in self.sources]
    if len(infos) == 1:
      return infos[0]
    parts = [
      mixing.VERSION,
      [info.fingerprint for info in infos],
      self.weights,
    ]
    return dataclasses.replace(
      infos[0],
      num_tokens=sum(info.num_tokens for info in infos),
      num_documents=sum(info.num_documents for info in infos),
      fingerprint=digest_of(parts),
    )


def load_mixture(config: DataConfig, split: str) -> Mixture:
  """Returns the same split of all data sets that are read; see `load_split`.

  Args:
    config: names them.
    split: of each.
  """
  sources = [
    load_split(
      name,
      split,
      data_dir=config.data_dir,
      tokenizer=config.tokenizer,
      sequence_length=config.sequence_length,
    )
    for name in config.datasets
  ]
  return Mixture.create(sources, config.weights)


def find_mixture(config: DataConfig, split: str) -> Mixture | None:
  """As `load_mixture`; None unless all have the split, and a row of it."""
  encoder = get_tokenizer(config.tokenizer)
  place = _Place(
    config.data_dir, config.tokenizer, encoder, config.sequence_length
  )
  for name in config.datasets:
    if not has_rows(place.packed(place.stored(name)), split):
      return None
  return load_mixture(config, split)


def train_iterator(
  mixture: Mixture,
  *,
  batch_size: int,
  seed: int,
  rows: Sequence[int] | np.ndarray | None = None,
  num_threads: int = 1,
) -> grain.DatasetIterator[Batch]:
  """Returns an endless iterator over batches, shuffled anew in each epoch.

  An epoch of a data set holds each of its rows once; a batch may begin in one
  epoch and end in the next. Of several, each has epochs of its own, and has of
  the rows up to any the share that its weight says; see `mixing`.
  `get_state` (a JSON-serialisable dict) and `set_state` resume exactly,
  also with other rows or threads.

  Args:
    mixture: the rows.
    batch_size: B, the rows of one step over all hosts.
    seed: decides the order; 0 <= seed < 2**32.
    rows: which rows of every batch to read and return; None for all.
    num_threads: threads that prepare batches ahead; 0 prepares each on demand.

  Returns:
    Batches: dicts of int32 arrays [len(rows), T+1].

  Raises:
    ConfigError: B does not fit the source, rows that a batch does not have, or
      a bad seed.
  """
  _check_at_least("batch_size", batch_size, 1)
  _check_at_least("num_threads", num_threads, 0)
  own = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
  if own.ndim != 1 or not len(own) or own.min() < 0 or own.max() >= batch_size:
    raise ConfigError(
      f"rows {own.tolist()} must be some of 0 to {batch_size - 1}, the rows of"
      f" a batch of {batch_size}."
    )
  if batch_size > len(mixture):
    raise ConfigError(
      f"batch_size {batch_size} is larger than the training set, which has "
      f"{len(mixture)} rows; use a batch_size of at most {len(mixture)}, or a "
      "shorter sequence_length."
    )
  if not 0 <= seed < 2**32:
    raise ConfigError(f"seed must be from 0 to 2**32 - 1, got {seed}.")
  orders = [
    # Endless for every purpose. repeat() without a number has length
    # sys.maxsize, which overflows in batches of one row (grain 0.2.18).
    grain.MapDataset.source(source)
    .seed((seed + i * _NEXT_SEED) % 2**32)
    .shuffle()
    .repeat(2**62 // len(source))
    for i, source in enumerate(mixture.sources)
  ]
  sums = mixing.cumulative(mixture.weights)

  def read(number: int) -> dict[str, np.ndarray]:
    i, k = mixing.turn(number, sums)
    return orders[i][k]

  def batch(number: int) -> Batch:
    found = [read(int(number * batch_size + row)) for row in own]
    return {name: np.stack([row[name] for row in found]) for name in found[0]}

  # The state is how many batches were read: the same whatever the rows.
  length = min(map(len, orders)) // batch_size
  batches = grain.MapDataset.range(length).map(batch)
  options = grain.ReadOptions(
    num_threads=num_threads, prefetch_buffer_size=4 * num_threads
  )
  return iter(batches.to_iter_dataset(options))


def validation_batches(
  mixture: Mixture, *, batch_size: int, num_rows: int | None
) -> list[Batch]:
  """Returns the batches of every evaluation; see `fixed_batches`."""
  return list(fixed_batches(mixture, batch_size=batch_size, num_rows=num_rows))


def fixed_batches(
  mixture: Mixture, *, batch_size: int, num_rows: int | None
) -> Iterator[Batch]:
  """Yields batches of some rows, always the same ones, read when asked for.

  Args:
    mixture: the rows; of each data set the first, in an order that never
      changes, are used, whatever the batch size.
    batch_size: B.
    num_rows: how many rows at most; None for all. See `Mixture.chosen`.

  Yields:
    Dicts of int32 arrays [B, T+1]. The missing rows of the last batch are
    padding: segment id 0 everywhere, so no target counts.

  Raises:
    ConfigError: batch_size is below 1, or num_rows too small.
  """
  _check_at_least("batch_size", batch_size, 1)
  chosen: list[tuple[PackedSequences, int]] = []
  counts = mixture.chosen(num_rows)
  for source, count in zip(mixture.sources, counts, strict=True):
    # Not in stored order, so that a part of the set resembles all of it.
    # RandomState, because numpy never changes what it returns for a seed.
    order = np.random.RandomState(0).permutation(len(source))
    chosen += [(source, int(k)) for k in order[:count]]
  for begin in range(0, len(chosen), batch_size):
    rows = [source[k] for source, k in chosen[begin : begin + batch_size]]
    padding = {name: np.zeros_like(row) for name, row in rows[0].items()}
    padding["tokens"] += mixture.info.pad_id
    rows += [padding] * (batch_size - len(rows))
    yield {name: np.stack([row[name] for row in rows]) for name in padding}


def _check_at_least(name: str, value: int, least: int) -> None:
  """Raises ConfigError if an option is too small."""
  if value < least:
    raise ConfigError(f"{name} must be at least {least}, got {value}.")
