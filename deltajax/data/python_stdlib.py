"""TFDS builder of a corpus that every machine has: Python's standard library.

The sources of the running interpreter are found at run time: nothing is
downloaded, and no TensorFlow is imported (records are ArrayRecord). The
configuration is named after the Python version, so that two interpreters may
share a data directory.
"""

from collections.abc import Iterator
import hashlib
import os
from pathlib import Path
import platform
import sys
import sysconfig
from typing import Any, ClassVar, NamedTuple

import tensorflow_datasets as tfds

from deltajax.data.split_plan import SPLITS
from deltajax.routing.validation import ConfigError

_EXCLUDED = frozenset(("site-packages", "dist-packages"))
# Above 1000 MiB a split, TFDS sorts the records in files that it writes with
# TensorFlow.
_MAX_SPLIT_BYTES = 900 * 2**20


class Document(NamedTuple):
  """One file. `path` is relative to the root; `digest` is of the content."""

  path: str
  text: str
  digest: str


def assign_split(digest: str) -> str:
  """Returns the split (90/5/5 percent) of the content with this sha256.

  Only the content decides: a copy under another name stays in the same split,
  and a document never moves because others come or go.
  """
  percent = int(digest[:16], 16) % 100
  return "train" if percent < 90 else "validation" if percent < 95 else "test"


def find_documents(root: Path) -> Iterator[Document]:
  """Yields the distinct documents below `root`, in the order of their paths.

  Skips files that are blank or not UTF-8, exact copies of earlier files, and
  everything in site-packages and dist-packages.
  """
  paths = []
  for directory, subdirectories, names in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if d not in _EXCLUDED]
    paths += [Path(directory, n) for n in names if n.endswith(".py")]
  seen = set()
  for path in sorted(paths, key=lambda p: p.relative_to(root).as_posix()):
    if not path.is_file():  # a dangling link, or a directory named like a file
      continue
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest in seen:
      continue
    seen.add(digest)
    try:
      text = raw.decode("utf-8")
    except UnicodeDecodeError:
      continue
    if text.strip():
      yield Document(path.relative_to(root).as_posix(), text, digest)


def library_root() -> Path:
  """Where the running interpreter has its standard library."""
  return Path(sysconfig.get_paths()["stdlib"])


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
  """The .py files of the standard library, one document per distinct file."""

  name = "python_stdlib"
  # To be raised when `find_documents` or `assign_split` changes.
  VERSION = tfds.core.Version("1.0.0")
  RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "Initial release."}
  BUILDER_CONFIGS: ClassVar[list[tfds.core.BuilderConfig]] = [
    tfds.core.BuilderConfig(
      name=f"{sys.implementation.name}-{platform.python_version()}",
      description="The standard library of the running interpreter.",
    )
  ]

  # Nothing is downloaded, hence no checksums. The search for their file would
  # import importlib_resources, which TFDS 4.9.10 forgot to depend on.
  url_infos = None

  def _info(self) -> tfds.core.DatasetInfo:
    return _LocalInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict(
        {"path": tfds.features.Text(), "text": tfds.features.Text()}
      ),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing is downloaded.
    root = library_root()
    by_split: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in find_documents(root):
      by_split[assign_split(document.digest)].append(document)
    if not any(by_split.values()):
      raise ConfigError(
        f"the corpus is empty: no .py file with text in UTF-8 in {str(root)!r}."
      )
    for split, documents in by_split.items():
      size = sum(len(document.text.encode()) for document in documents)
      if size > _MAX_SPLIT_BYTES:
        raise ConfigError(
          f"split {split!r} has {size} bytes; TFDS can write at most "
          f"{_MAX_SPLIT_BYTES} without TensorFlow. Give {str(root)!r} to"
          " train.prepare_data, with --kind text and --pattern '*.py'."
        )
    # TFDS cannot write a split without examples, which small roots may have.
    return {
      split: self._generate_examples(documents)
      for split, documents in by_split.items()
      if documents
    }

  def _generate_examples(
    self, documents: list[Document]
  ) -> Iterator[tuple[str, dict[str, str]]]:
    # TFDS orders the records by a hash of the key, hence by content.
    for document in documents:
      yield document.digest, {"path": document.path, "text": document.text}


class _LocalInfo(tfds.core.DatasetInfo):
  """DatasetInfo that never asks a bucket for precomputed information."""

  def initialize_from_bucket(self) -> None:
    """Does nothing: TFDS would make a temporary directory and look online."""
