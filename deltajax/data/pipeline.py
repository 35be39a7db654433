"""Batches: a stored split becomes rows, and rows become training batches.

Batch k of a training run is a pure function of (seed, k, source). Neither
threads nor the number of hosts have a say in it, so that a run can be
resumed anywhere.

Shapes: B batch, T sequence; `_T1` is T+1.
"""

from collections.abc import Sequence
import os
from pathlib import Path

import grain
import numpy as np

from deltajax.data import storage
from deltajax.data.packed_dataset import (
  check_packed_for,
  is_packed,
  open_packed,
  pack_texts,
)
from deltajax.data.packing import PackedSequences
from deltajax.data.python_stdlib import PythonStdlib
from deltajax.data.tokenizers import Tokenizer
from deltajax.routing.validation import ConfigError, unknown_name

DATASETS = {PythonStdlib.name: PythonStdlib}

Batch = dict[str, np.ndarray]


def load_split(
  dataset: str,
  split: str,
  *,
  data_dir: str | os.PathLike[str],
  tokenizer: Tokenizer,
  sequence_length: int,
) -> PackedSequences:
  """Returns a split as packed rows; makes what is missing on disk.

  Tokenising happens once for a data set, tokenizer and sequence length, here or
  by `train.prepare_data`; after that, rows are read when they are asked for.

  Args:
    dataset: a key of `DATASETS`, or the path (with a "/") of a TFDS directory
      that is packed, or whose records have a `text` feature.
    split: the name of the split.
    data_dir: where data sets are kept.
    tokenizer: what to encode the documents with.
    sequence_length: T.

  Raises:
    ConfigError: no such data set or split, not enough data for one row, or
      rows that were packed for another tokenizer or sequence length.
  """
  if "/" in dataset or os.sep in dataset:
    directory = Path(dataset)
  elif dataset in DATASETS:
    directory = storage.build_dataset(DATASETS[dataset], data_dir)
  else:
    raise ConfigError(
      unknown_name("dataset", dataset, DATASETS)
      + " A TFDS directory is given as a path with a '/'."
    )
  storage.check_has(directory, "split", split, storage.split_names(directory))
  if is_packed(directory):
    check_packed_for(
      directory, tokenizer=tokenizer, sequence_length=sequence_length
    )
    packed = directory
  else:
    packed = pack_texts(
      directory,
      data_dir=data_dir,
      tokenizer=tokenizer,
      sequence_length=sequence_length,
    )
  try:
    return open_packed(packed, split)
  except ConfigError as error:
    raise ConfigError(f"split {split!r} of {dataset}: {error}") from None


def train_iterator(
  source: PackedSequences,
  *,
  batch_size: int,
  seed: int,
  rows: Sequence[int] | np.ndarray | None = None,
  num_threads: int = 1,
) -> grain.DatasetIterator[Batch]:
  """Returns an endless iterator over batches, shuffled anew in each epoch.

  An epoch holds every row once; a batch may begin in one epoch and end in the
  next. `get_state` (a JSON-serialisable dict) and `set_state` resume exactly,
  also with other rows or threads.

  Args:
    source: the rows.
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
  if batch_size > len(source):
    raise ConfigError(
      f"batch_size {batch_size} is larger than the training set, which has "
      f"{len(source)} rows; use a batch_size of at most {len(source)}, or a "
      "shorter sequence_length."
    )
  if not 0 <= seed < 2**32:
    raise ConfigError(f"seed must be from 0 to 2**32 - 1, got {seed}.")
  # Endless for every purpose. repeat() without a number has length
  # sys.maxsize, which overflows in batches of one row (grain 0.2.18).
  epochs = 2**62 // len(source)
  order = grain.MapDataset.source(source).seed(seed).shuffle().repeat(epochs)

  def batch(number: int) -> Batch:
    found = [order[int(number * batch_size + row)] for row in own]
    return {name: np.stack([row[name] for row in found]) for name in found[0]}

  # The state is how many batches were read: the same whatever the rows.
  batches = grain.MapDataset.range(len(order) // batch_size).map(batch)
  options = grain.ReadOptions(
    num_threads=num_threads, prefetch_buffer_size=4 * num_threads
  )
  return iter(batches.to_iter_dataset(options))


def validation_batches(
  source: PackedSequences, *, batch_size: int, num_rows: int
) -> list[Batch]:
  """Returns the batches of every evaluation, always the same ones.

  Args:
    source: the rows; the first `num_rows` of them, in an order that never
      changes, are used, whatever the batch size.
    batch_size: B.
    num_rows: how many rows at most; fewer if the source is used up.

  Returns:
    Batches: dicts of int32 arrays [B, T+1]. The missing rows of the last batch
    are padding: segment id 0 everywhere, so no target counts.

  Raises:
    ConfigError: batch_size or num_rows is below 1.
  """
  _check_at_least("batch_size", batch_size, 1)
  _check_at_least("num_rows", num_rows, 1)
  # Not in stored order, so that a part of the set resembles all of it.
  # RandomState, because numpy never changes what it returns for a seed.
  order = np.random.RandomState(0).permutation(len(source))
  order = order[:num_rows]
  padding = {
    name: np.zeros_like(row) for name, row in source[int(order[0])].items()
  }
  padding["tokens"] += source.info.pad_id
  batches = []
  for begin in range(0, len(order), batch_size):
    rows = [source[int(k)] for k in order[begin : begin + batch_size]]
    rows += [padding] * (batch_size - len(rows))
    batches.append(
      {name: np.stack([row[name] for row in rows]) for name in padding}
    )
  return batches


def _check_at_least(name: str, value: int, least: int) -> None:
  """Raises ConfigError if an option is too small."""
  if value < least:
    raise ConfigError(f"{name} must be at least {least}, got {value}.")
