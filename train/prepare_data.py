"""Makes a packed data set of a corpus of texts, and shows one.

    python -m train.prepare_data build OUT --sources PATH... \\
        --tokenizer bytes --sequence-length 1024
    python -m train.prepare_data inspect OUT

Sources are parquet (`--column`), JSON lines (plain, .gz, .zst), texts,
directories of one of these, and TFDS directories. The same command goes on
where one was killed. A run then takes `--data.dataset OUT`.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Annotated, ClassVar

import numpy as np
import tyro

from deltajax.data.manifest import Manifest, read_manifest
from deltajax.data.packed_dataset import open_packed
from deltajax.data.packing import PackedSequences
from deltajax.data.prepare import Corpus, prepare, TOKENIZER_DIRECTORY
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from train.cli import check_counts, main, parse_subcommand, Subcommand

Out = tyro.conf.Positional[
  Annotated[pathlib.Path, tyro.conf.arg(metavar="OUT")]
]


@dataclasses.dataclass(frozen=True)
class Build:
  """Writes a packed data set; the same command resumes it.

      python -m train.prepare_data build OUT --sources PATH... \\
          --tokenizer bytes --sequence-length 1024

  Attributes:
    out: the directory that is written; what is not finished is in OUT.partial.
    corpus: what is read, and how.
    workers: processes; by default as many as there are cores.
  """

  usage: ClassVar[str] = (
    "OUT --sources PATH ... --tokenizer NAME --sequence-length T [...]"
  )

  out: Out
  corpus: tyro.conf.OmitArgPrefixes[Corpus]
  workers: int | None = None

  def run(self) -> None:
    """Prepares, and says what came out."""
    try:
      manifest = prepare(self.corpus, self.out, workers=self.workers)
    except OSError as error:
      raise OSError(
        f"{error}\nwhat was finished is in {self.out}.partial; the same command"
        " goes on from there."
      ) from None
    print("\n".join(summary_lines(manifest)))
    place = self.out if "/" in str(self.out) else f"./{self.out}"
    name = manifest.tokenizer_name
    if (self.out / TOKENIZER_DIRECTORY).is_dir():
      name = f"{place}/{TOKENIZER_DIRECTORY}"
    print(
      f"options    --data.dataset {place} --data.tokenizer {name}"
      f" --data.sequence-length {manifest.sequence_length}"
      f" --model.vocab-size {manifest.tokenizer['vocab_size']}"
    )


@dataclasses.dataclass(frozen=True)
class Inspect:
  """Prints the manifest of a prepared data set, and some rows as text.

  Attributes:
    directory: of the data set.
    rows: how many of each split.
    characters: of each document in them.
  """

  usage: ClassVar[str] = "DIR [--rows N] [--characters N]"

  directory: tyro.conf.Positional[
    Annotated[pathlib.Path, tyro.conf.arg(metavar="DIR")]
  ]
  rows: int = 2
  characters: int = 200

  def run(self) -> None:
    """Prints."""
    check_counts(rows=self.rows, characters=self.characters)
    manifest = read_manifest(self.directory)
    stored = self.directory / TOKENIZER_DIRECTORY
    name = str(stored) if stored.is_dir() else manifest.tokenizer_name
    tokenizer = get_tokenizer(name)
    splits = {
      split: open_packed(self.directory, split) for split in manifest.splits
    }
    print(json.dumps(dataclasses.asdict(manifest), indent=2))
    for split, packed in splits.items():
      numbers = np.linspace(0, len(packed) - 1, min(self.rows, len(packed)))
      for k in numbers.astype(int):
        lines = sample_lines(packed, k, tokenizer, self.characters)
        print(f"\n{split}, row {k} of {len(packed)}:", *lines, sep="\n")
    print("", *summary_lines(manifest), sep="\n")


def sample_lines(
  packed: PackedSequences, number: int, tokenizer: Tokenizer, characters: int
) -> list[str]:
  """The beginning of each document of a row.

  Args:
    packed: a split.
    number: of the row.
    tokenizer: of the split.
    characters: of each document.
  """
  row = packed[number]
  lines = []
  for segment in range(1, row["segment_ids"].max() + 1):
    tokens = row["tokens"][row["segment_ids"] == segment]
    text = tokenizer.decode(tokens)
    more = "..." if len(text) > characters else ""
    lines.append(f"  {len(tokens)} tokens: {text[:characters]!r}{more}")
  return lines


def summary_lines(manifest: Manifest) -> list[str]:
  """What a data set holds."""
  skipped = "".join(
    f", {count} records skipped ({reason})"
    for reason, count in manifest.skipped.items()
  )
  if manifest.empty:
    skipped += f", {manifest.empty} documents without text"
  if manifest.replaced:
    skipped += f", {manifest.replaced} documents with bytes replaced"
  lines = [
    f"documents  {manifest.num_documents:,}, {manifest.num_text_bytes:,} bytes,"
    f" {manifest.num_tokens:,} tokens; {manifest.duplicates:,} dropped as"
    f" duplicates{skipped}"
  ]
  nothing = [x.path for x in manifest.sources if not x.num_documents]
  if nothing:
    lines.append(
      f"empty      {len(nothing)} sources without a document, the first is"
      f" {nothing[0]}"
    )
  for split, info in manifest.splits.items():
    lines.append(
      f"{split:<11}{info.num_documents:,} documents, {info.num_tokens:,} tokens"
      f" with bos and eos, {info.num_rows:,} rows of"
      f" {info.sequence_length} + 1"
    )
  return lines


SUBCOMMANDS: dict[str, type[Subcommand]] = {"build": Build, "inspect": Inspect}


def parse(arguments: list[str]) -> Subcommand:
  """Parses the command line."""
  command = "python -m train.prepare_data"
  return parse_subcommand(command, SUBCOMMANDS, arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Runs a subcommand."""
  parse(arguments).run()


if __name__ == "__main__":
  main(command, resumes=sys.argv[1:2] == ["build"])
