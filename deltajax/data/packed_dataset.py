"""Packed data sets: rows of T+1 tokens on disk, read one by one.

A TFDS directory in ArrayRecord, in the order of packing. Whoever needs a few
rows reads these few, however large the corpus is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from array_record.python import array_record_module
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from deltajax.data import storage
from deltajax.data.packing import (
  pack_rows,
  PackedRow,
  PackedSequences,
  Packer,
  packing_info,
  PackingInfo,
  rows_per_shard,
  shard_digest,
  token_dtype,
)
from deltajax.data.tokenizers import Tokenizer
from deltajax.files import digest_of
from deltajax.routing.validation import ConfigError

_NAME = "packed"
# To be raised when the same documents give other rows, or are stored otherwise.
PACK_VERSION = "2.0.0"


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
    PACK_VERSION,
    storage.stamp(text_directory),
    tokenizer.fingerprint,
    sequence_length,
  ]
  name = digest_of(key)[:16]
  target = data_dir / _NAME / name / PACK_VERSION

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


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file of rows, as it was written.

  Attributes:
    num_rows: in the file.
    num_bytes: of its records, before compression.
    digest: `shard_digest` of the rows.
  """

  num_rows: int
  num_bytes: int
  digest: bytes


@dataclasses.dataclass(frozen=True)
class PackedSplit:
  """What the metadata say of a split."""

  info: PackingInfo
  shards: Sequence[Shard]


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
  splits = {}
  for split, of_split in documents.items():
    packer = Packer(tokenizer, sequence_length)
    rows = pack_rows(packer, of_split)
    shards: list[Shard] = []
    for row in rows:
      some = itertools.islice(rows, rows_per_shard(sequence_length) - 1)
      file = directory / f"{split}.{len(shards)}"
      shards.append(write_shard(file, itertools.chain([row], some)))
    for k in range(len(shards)):
      name = shard_name(split, k, len(shards))
      os.rename(directory / f"{split}.{k}", directory / name)
    info = packing_info(
      tokenizer,
      sequence_length,
      num_tokens=packer.num_tokens,
      num_documents=packer.num_documents,
      shard_digests=[shard.digest for shard in shards],
    )
    splits[split] = PackedSplit(info, shards)
  write_metadata(directory, splits, tokenizer)


def shard_name(split: str, number: int, count: int) -> str:
  """The name of a file of a packed data set."""
  return f"{_NAME}-{split}.array_record-{number:05}-of-{count:05}"


def write_shard(file: Path, rows: Iterable[PackedRow]) -> Shard:
  """Writes rows to a file, one by one.

  Raises:
    OSError: the disk is full, or fails.
  """
  # Rows are read one by one, hence compressed so.
  writer = array_record_module.ArrayRecordWriter(
    os.fspath(file), "group_size:1,zstd:1"
  )
  num_rows = num_bytes = 0

  def write_all() -> Iterator[PackedRow]:
    nonlocal num_rows, num_bytes
    for row in rows:
      record = _record(row)
      _or_os_error(writer.write, record)
      num_rows += 1
      num_bytes += len(record)
      yield row

  digest = shard_digest(write_all())
  _or_os_error(writer.close)
  return Shard(num_rows, num_bytes, digest)


def write_metadata(
  directory: Path, splits: Mapping[str, PackedSplit], tokenizer: Tokenizer
) -> None:
  """Makes a directory that holds all shards a packed data set.

  Args:
    directory: holds the files that `shard_name` names.
    splits: all that there are.
    tokenizer: of the documents.
  """
  with storage.quiet():
    info = tfds.core.DatasetInfo(
      builder=tfds.core.dataset_info.DatasetIdentity(
        name=_NAME,
        version=tfds.core.Version(PACK_VERSION),
        data_dir=str(directory),
        module_name=__name__,
      ),
      description=__doc__,
      features=_features(tokenizer),
      metadata=tfds.core.MetadataDict(
        packing={
          name: dataclasses.asdict(split.info) for name, split in splits.items()
        },
        tokenizer=tokenizer.fingerprint,
      ),
    )
    info.set_file_format("array_record")
    info.set_splits(
      tfds.core.SplitDict(
        [
          tfds.core.SplitInfo(
            name=name,
            shard_lengths=[shard.num_rows for shard in split.shards],
            num_bytes=sum(shard.num_bytes for shard in split.shards),
            filename_template=tfds.core.ShardedFileTemplate(
              dataset_name=_NAME,
              data_dir=directory,
              split=name,
              filetype_suffix="array_record",
            ),
          )
          for name, split in splits.items()
        ]
      )
    )
    info.write_to_directory(directory)


def is_packed(directory: str | os.PathLike[str]) -> bool:
  """Whether a TFDS directory holds rows, not texts.

  Raises:
    ConfigError: it is no TFDS directory.
  """
  return "packing" in _metadata(storage.open_dataset(directory))


def packed_length(directory: str | os.PathLike[str]) -> int | None:
  """T of the rows of a TFDS directory; None of one that holds texts.

  Raises:
    ConfigError: it is no TFDS directory.
  """
  packing = _metadata(storage.open_dataset(directory)).get("packing")
  if not packing:
    return None
  return next(iter(packing.values()))["sequence_length"]


def check_packed_for(
  directory: str | os.PathLike[str],
  *,
  tokenizer: Tokenizer,
  sequence_length: int,
) -> None:
  """Raises ConfigError unless a packed data set is what a run would pack.

  Args:
    directory: of the packed data set.
    tokenizer: of the run.
    sequence_length: T of the run.
  """
  metadata = _metadata(storage.open_dataset(directory))
  where = f"{str(directory)!r} is packed"
  for packing in metadata["packing"].values():
    if packing["sequence_length"] != sequence_length:
      raise ConfigError(
        f"{where} for a sequence_length of {packing['sequence_length']}; that"
        f" of the run is {sequence_length}. Change it, or prepare the corpus"
        " again."
      )
  if metadata["tokenizer"] != tokenizer.fingerprint:
    raise ConfigError(
      f"{where} with the tokenizer of fingerprint {metadata['tokenizer']!r};"
      f" that of the run has {tokenizer.fingerprint!r}. Use the same, or"
      " prepare the corpus again."
    )


def has_rows(directory: str | os.PathLike[str], split: str) -> bool:
  """Whether a packed data set has a split, and one row of it at least."""
  found = _metadata(storage.open_dataset(directory))["packing"].get(split)
  return found is not None and PackingInfo(**found).fills_a_row


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
  packing = _metadata(builder).get("packing")
  if packing is None:
    raise ConfigError(f"{str(directory)!r} is not a packed data set.")
  if str(builder.version) != PACK_VERSION:
    raise ConfigError(
      f"{str(directory)!r} is packed in version {builder.version}; this is"
      f" {PACK_VERSION}. Prepare the corpus again."
    )
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


def _metadata(builder: tfds.core.DatasetBuilder) -> Mapping[str, Any]:
  return builder.info.metadata or {}


def _or_os_error(call: Callable[..., Any], *args: Any) -> None:
  """Calls a method of the writer, whose every error is a RuntimeError."""
  try:
    call(*args)
  except RuntimeError as error:
    raise OSError(str(error)) from None


def _record(row: PackedRow) -> bytes:
  """A row as `_features` says; the same bytes in every process."""
  example = tf_example_pb2.Example()
  for name, values in row._asdict().items():
    example.features.feature[name].bytes_list.value.append(values.tobytes())
  # TFDS's own serializer leaves the order of the features to chance.
  return example.SerializeToString(deterministic=True)


def _features(tokenizer: Tokenizer) -> tfds.features.FeaturesDict:
  def integers(dtype: np.dtype) -> tfds.features.Tensor:
    return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")

  return tfds.features.FeaturesDict(
    {
      "tokens": integers(token_dtype(tokenizer)),
      "starts": integers(np.dtype(np.int32)),
    }
  )
