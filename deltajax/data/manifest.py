"""What a prepared data set is made of, written beside its rows."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from pathlib import Path
from typing import Any

from deltajax.data.packing import PackingInfo
from deltajax.routing.validation import ConfigError

FILE_NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Source:
  """A file, or a run of small ones, that was read.

  Attributes:
    kind: parquet, jsonl, text or tfds.
    path: of the file, or of the first.
    num_files: more than 1 for small files of text, which follow one another.
    num_bytes: of all of them.
    sha256: of the file; of several, that of the lines of theirs.
    num_documents: read from it.
    num_tokens: of these.
    replaced: documents in which bytes that are not UTF-8 were replaced.
    skipped: records that gave no document, by reason.
    empty: documents without text.
  """

  kind: str
  path: str
  num_files: int
  num_bytes: int
  sha256: str
  num_documents: int
  num_tokens: int
  replaced: int
  skipped: dict[str, int]
  empty: int = 0


@dataclasses.dataclass(frozen=True)
class Manifest:
  """All that decides a prepared data set, and what came of it.

  Attributes:
    pack_version: of the rows.
    tokenizer_name: as it was given.
    tokenizer: its fingerprint, and the ids of the specials.
    sequence_length: T.
    reading: how records became documents.
    split_rule: how documents found their split.
    fractions: of the documents, for each split.
    num_documents: that were read.
    num_text_bytes: of these, as UTF-8.
    num_tokens: of these, without bos and eos.
    duplicates: documents that were dropped, because their text had been read.
    replaced: documents in which bytes that are not UTF-8 were replaced.
    skipped: records that gave no document, by reason.
    splits: what is in the rows; here bos and eos are counted.
    sources: what was read, in order.
    empty: documents without text.
  """

  pack_version: str
  tokenizer_name: str
  tokenizer: dict[str, Any]
  sequence_length: int
  reading: dict[str, Any]
  split_rule: str
  fractions: dict[str, float]
  num_documents: int
  num_text_bytes: int
  num_tokens: int
  duplicates: int
  replaced: int
  skipped: dict[str, int]
  splits: dict[str, PackingInfo]
  sources: tuple[Source, ...]
  empty: int = 0

  def write(self, directory: Path) -> None:
    """Writes the file."""
    text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
    (directory / FILE_NAME).write_text(text)

  def check_same(self, directory: Path, decided: Mapping[str, Any]) -> None:
    """Raises ConfigError unless it has these fields; names one that differs.

    Args:
      directory: of this manifest.
      decided: fields of the manifest that there would be.
    """
    for name, value in decided.items():
      found = getattr(self, name)
      if found != value:
        raise ConfigError(
          f"{directory} holds a data set that was prepared with {name} {found};"
          f" now it is {value}: name another directory, or remove it."
        )

  def check_sources(
    self, directory: Path, kinds: Sequence[str], sha256: Sequence[str]
  ) -> None:
    """Raises ConfigError unless it was made from these; see `check_same`.

    Args:
      directory: of this manifest.
      kinds: of each part.
      sha256: of each part.
    """
    before = [(source.kind, source.sha256) for source in self.sources]
    now = list(zip(kinds, sha256, strict=True))
    if before == now:
      return
    what = f"{len(before)} parts, now {len(now)}"
    for source, (kind, digest) in zip(self.sources, now, strict=False):
      if source.kind != kind:
        what = f"{source.path} as {source.kind}, now as {kind}"
      elif source.sha256 != digest:
        what = source.path
      else:
        continue
      break
    raise ConfigError(
      f"{directory} holds a data set that was prepared from other sources"
      f" ({what}): name another directory, or remove it."
    )


def read_manifest(directory: Path) -> Manifest:
  """Reads the manifest of a prepared data set; raises ConfigError if none."""
  file = directory / FILE_NAME
  try:
    fields = json.loads(file.read_text())
    fields["splits"] = {
      k: PackingInfo(**x) for k, x in fields["splits"].items()
    }
    fields["sources"] = tuple(Source(**x) for x in fields["sources"])
    return Manifest(**fields)
  except FileNotFoundError:
    raise ConfigError(
      f"{directory} is no prepared data set: it has no {FILE_NAME}."
    ) from None
  except (ValueError, TypeError, KeyError) as error:
    raise ConfigError(f"{file} is no manifest: {error!r}.") from None
