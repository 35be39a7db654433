"""Packed data sets: rows of T+1 tokens on disk, read one by one.

A TFDS directory in ArrayRecord, in the order of packing. Whoever needs a few
rows reads these few, however large the corpus is.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from deltajax.data import storage
from deltajax.data.packing import (
  PackedRow,
  PackedSequences,
  Packer,
  PackingInfo,
  token_dtype,
)
from deltajax.data.tokenizers import Tokenizer
from deltajax.routing.validation import ConfigError

_NAME = "packed"
# To be raised when the same documents give other rows, or are stored otherwise.
_VERSION = "1.0.0"
_ROWS_PER_SHARD = 2**16
_ROWS_AT_ONCE = 1000


def pack_texts(
  text_directory: str | os.PathLike[str],
  *,
  data_dir: str | os.PathLike[str],
  tokenizer: Tokenizer,
  sequence_length: int,
) -> Path:
  """Tokenises and packs all splits of a data set of texts, once.

  Args:
    text_directory: a TFDS directory whose records have a `text` feature.
    data_dir: the root of all data sets.
    tokenizer: what to encode the documents with.
    sequence_length: T.

  Returns:
    The packed data set's directory; as it is, if it was packed before.

  Raises:
    ConfigError: for a directory that cannot be read or written.
  """
  text_directory = Path(text_directory).expanduser()
  data_dir = Path(data_dir).expanduser()
  splits = storage.split_names(text_directory)
  key = [
    _VERSION,
    storage.stamp(text_directory),
    tokenizer.fingerprint,
    sequence_length,
  ]
  digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
  target = data_dir / _NAME / digest / _VERSION

  def write(scratch: Path) -> Path:
    documents = {
      split: map(tokenizer.encode, storage.read_texts(text_directory, split))
      for split in splits
    }
    write_packed(
      scratch,
      documents,
      tokenizer=tokenizer,
      sequence_length=sequence_length,
    )
    return scratch

  return storage.build_once(target, data_dir, write)


def write_packed(
  directory: Path,
  documents: Mapping[str, Iterable[np.ndarray]],
  *,
  tokenizer: Tokenizer,
  sequence_length: int,
) -> None:
  """Writes a packed data set, a row at a time.

  Args:
    directory: an empty directory.
    documents: of each split, token ids without bos and eos.
    tokenizer: gives the special ids.
    sequence_length: T.

  Raises:
    ConfigError: documents that cannot be packed.
  """
  info: dict[str, Any] = {}
  with storage.quiet():
    writer = tfds.core.SequentialWriter(
      tfds.core.DatasetInfo(
        builder=tfds.core.dataset_info.DatasetIdentity(
          name=_NAME,
          version=tfds.core.Version(_VERSION),
          data_dir=str(directory),
          module_name=__name__,
        ),
        description=__doc__,
        features=tfds.features.FeaturesDict(
          {
            "tokens": _integers(token_dtype(tokenizer)),
            "starts": _integers(np.dtype(np.int32)),
          }
        ),
        metadata=tfds.core.MetadataDict(packing=info),
      ),
      max_examples_per_shard=_ROWS_PER_SHARD,
      file_format="array_record",
    )
    writer.initialize_splits(list(documents))
    for split, of_split in documents.items():
      packer = Packer(tokenizer, sequence_length)
      rows = _all_rows(packer, of_split)
      while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        writer.add_examples({split: [row._asdict() for row in some]})
      info[split] = dataclasses.asdict(packer.info())
    writer.close_all()


def open_packed(
  directory: str | os.PathLike[str], split: str
) -> PackedSequences:
  """Opens a split of a packed data set; reads nothing of its rows.

  Raises:
    ConfigError: not a packed data set, no such split, or a split with less
      than one row.
  """
  directory = Path(directory).expanduser()
  builder = storage.open_dataset(directory)
  packing = (builder.info.metadata or {}).get("packing")
  if packing is None:
    raise ConfigError(f"{str(directory)!r} is not a packed data set.")
  storage.check_has(directory, "split", split, packing)
  rows = _StoredRows(builder, split)
  info = PackingInfo(**packing[split])
  if len(rows) != info.num_rows:
    raise ConfigError(
      f"{str(directory)!r}: split {split!r} has {len(rows)} rows; its metadata"
      f" say {info.num_rows}. Remove the directory, so that it is made anew."
    )
  return PackedSequences(rows, info)


class _StoredRows:
  """The rows of a split, each read when it is asked for."""

  def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
    self._records = storage.records(builder, split)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, k: int) -> PackedRow:
    return PackedRow(**self._records[k])


def _all_rows(
  packer: Packer, documents: Iterable[np.ndarray]
) -> Iterator[PackedRow]:
  for document in documents:
    yield from packer.add(document)
  yield from packer.finish()


def _integers(dtype: np.dtype) -> tfds.features.Tensor:
  return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")
