"""TFDS directories: built at most once, complete or absent, read back quietly.

TFDS is used without TensorFlow: records are ArrayRecord, and reading goes
through `as_data_source`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import os
from pathlib import Path
import tempfile
from typing import Any

from absl import logging
import tensorflow_datasets as tfds

from deltajax.files import digest_of
from deltajax.routing.validation import ConfigError, unknown_name


def build_dataset(
  builder_class: type[tfds.core.GeneratorBasedBuilder],
  data_dir: str | os.PathLike[str],
) -> Path:
  """Builds a data set, unless it is there, and returns its directory.

  Safe when several processes (or hosts, on a shared file system) do it at the
  same time: each builds in a directory of its own, the first to finish moves
  the result into place in one step, the others use that.

  Args:
    builder_class: the TFDS builder, of whose configurations the first is built.
    data_dir: the root of all data sets; created if missing.

  Returns:
    The directory, `data_dir`/name/config/version.

  Raises:
    ConfigError: `data_dir` cannot be written, or the builder found no data.
  """
  data_dir = Path(data_dir).expanduser()
  with quiet():
    target = builder_class(data_dir=data_dir).data_dir

  def build(scratch: Path) -> Path:
    with quiet():
      builder = builder_class(data_dir=scratch)
      builder.download_and_prepare(file_format="array_record")
    return Path(builder.data_dir)

  return build_once(target, data_dir, build)


def build_once(
  target: str | os.PathLike[str],
  data_dir: str | os.PathLike[str],
  build: Callable[[Path], Path],
) -> Path:
  """Makes a directory, unless it is there: complete, or not at all.

  Args:
    target: the directory, somewhere below `data_dir`.
    data_dir: the root of all data sets; created if missing.
    build: is given an empty directory of its own, and returns the directory
      in it that becomes the target.

  Returns:
    The target; another process' where that was faster.

  Raises:
    ConfigError: `data_dir` cannot be written.
  """
  target, data_dir = Path(target), Path(data_dir).expanduser()
  if target.is_dir():
    return target
  # TFDS itself names its temporary directory with the global `random`: two
  # processes that seeded it alike would write into the same one.
  try:
    data_dir.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(prefix=".building-", dir=data_dir)
  except OSError as error:
    raise ConfigError(
      f"data_dir {str(data_dir)!r} cannot be written: {error}; give a "
      "directory that can."
    ) from error
  with scratch as scratch_dir:
    built = build(Path(scratch_dir))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
      os.rename(built, target)
    except OSError:
      if not target.is_dir():
        raise  # Otherwise another process was faster; its result is the same.
  return target


def is_dataset(directory: str | os.PathLike[str]) -> bool:
  """Whether a directory is that of a version of a TFDS data set."""
  return (Path(directory).expanduser() / "dataset_info.json").is_file()


def open_dataset(
  directory: str | os.PathLike[str],
) -> tfds.core.DatasetBuilder:
  """Opens a TFDS directory, the one that holds dataset_info.json.

  Raises:
    ConfigError: it is not one.
  """
  directory = Path(directory).expanduser()
  if not directory.exists():
    raise ConfigError(
      f"there is no {str(directory)!r}; name a TFDS directory, one that"
      " train.prepare_data made, or files of text."
    )
  if not is_dataset(directory):
    raise ConfigError(
      f"{str(directory)!r} is not a TFDS directory: it has no "
      "dataset_info.json. Give the directory of one version, for example "
      "DATA_DIR/name/config/1.0.0."
    )
  with quiet():
    return tfds.builder_from_directory(directory)


def records(
  builder: tfds.core.DatasetBuilder, split: str
) -> Sequence[dict[str, Any]]:
  """The records of a split, in stored order, read when they are asked for.

  Reading one raises OSError, with file and record, if it is damaged.

  Args:
    builder: of the data set.
    split: its name, or a part of it such as `train[5:9]`.

  Raises:
    ConfigError: a file is missing, or of a format that cannot be read without
      TensorFlow.
  """
  for file in builder.info.splits[split].filepaths:
    if not file.exists():
      raise ConfigError(f"{file} is missing.")
  try:
    with quiet():
      return _Records(builder, split)
  except NotImplementedError as error:
    raise ConfigError(
      f"{str(builder.data_dir)!r} is stored as {builder.info.file_format}; only"
      " array_record can be read without TensorFlow."
    ) from error


class _Records(Sequence[dict[str, Any]]):
  """See `records`."""

  def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
    self._source = builder.as_data_source(split)
    self._files = builder.info.splits[split].file_instructions

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, k: Any) -> Any:
    if not 0 <= k < len(self):
      raise IndexError(f"record {k} of {len(self)}")
    try:
      record = self._source[k]
    except RuntimeError as error:  # ArrayRecord checks what it reads.
      raise OSError(f"{self._place(k)} cannot be read: {error}") from None
    # Of a file that was cut short, ArrayRecord may return nothing instead.
    if all(value is None for value in record.values()):
      raise OSError(f"{self._place(k)} cannot be read: it is empty.")
    return record

  def _place(self, k: int) -> str:
    for file in self._files:
      if k < file.take:
        return f"record {file.skip + k} of {file.filename}"
      k -= file.take
    raise IndexError(k)


def split_names(directory: str | os.PathLike[str]) -> list[str]:
  """The splits of a TFDS directory; ConfigError if it is none."""
  return list(open_dataset(directory).info.splits)


def stamp(directory: str | os.PathLike[str]) -> str:
  """Says which data a directory holds, without reading them.

  Names, sizes and times of its files: data that were built again have another
  stamp, and so have copies that lost their times.
  """
  found = [
    (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
    for entry in os.scandir(Path(directory).expanduser())
  ]
  return digest_of(sorted(found))


def read_texts(directory: str | os.PathLike[str], split: str) -> Iterator[str]:
  """Yields the `text` feature of every record of a split, in stored order.

  Args:
    directory: a TFDS directory, the one that holds dataset_info.json.
    split: the name of one of its splits.

  Raises:
    ConfigError: no TFDS directory, no such split, no `text` feature, or a
      file format that cannot be read without TensorFlow.
  """
  builder = open_dataset(directory)
  # A split without documents is not written, hence unknown too.
  check_has(directory, "split", split, builder.info.splits)
  check_feature(builder, "text")
  for record in records(builder, split):
    text = record["text"]
    if not isinstance(text, (bytes, str)):
      raise ConfigError(
        f"{str(directory)!r}: the feature 'text' must hold strings, got "
        f"{type(text).__name__}."
      )
    yield text.decode("utf-8") if isinstance(text, bytes) else text


def check_feature(builder: tfds.core.DatasetBuilder, name: str) -> None:
  """Raises ConfigError unless the records have a feature of this name."""
  features = builder.info.features
  names = features.keys() if hasattr(features, "keys") else ()
  check_has(builder.data_dir, "feature", name, names)


def check_has(
  directory: str | os.PathLike[str],
  kind: str,
  name: str,
  valid: Iterable[str],
) -> None:
  """Raises ConfigError, with the directory, unless `name` is in `valid`."""
  names = list(valid)
  if name not in names:
    message = unknown_name(kind, name, names)
    raise ConfigError(f"{str(directory)!r}: {message}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Keeps TFDS's prints, progress bars and log lines off the terminal."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    with (
      open(os.devnull, "w") as sink,
      contextlib.redirect_stdout(sink),
      contextlib.redirect_stderr(sink),
    ):
      yield
  finally:
    logging.set_verbosity(verbosity)
