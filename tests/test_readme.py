"""Commands of the README run, as they stand."""

import re
import shlex

import pytest

import deltajax
from deltajax import testing
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()


# As FineWeb-Edu has it.
FINEWEB_EDU = (
  *("text", "id", "dump", "url", "file_path", "language", "language_score"),
  *("token_count", "score", "int_score"),
)


def write_fineweb_edu(directory, documents):
  """Parquet files in the schema of FineWeb-Edu."""
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  directory.mkdir()
  for number in range(2):
    rows = [
      (
        *(f"Document {i} of a corpus. " * (3 + i % 9), f"<urn:uuid:{i}>"),
        *("CC-MAIN-2013-20", f"http://site.org/{i}", "s3://x", "en", 0.97),
        *(60, 3.1, 3),
      )
      for i in range(number, documents, 2)
    ]
    columns = dict(zip(FINEWEB_EDU, zip(*rows, strict=True), strict=True))
    parquet.write_table(
      pyarrow.table({name: list(x) for name, x in columns.items()}),
      directory / f"{number:03}_00000.parquet",
    )


def commands_with(text):
  """The commands of the block of the README that has this text, as words."""
  blocks = re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
  (block,) = [x for x in blocks if text in x]
  return [
    shlex.split(x, comments=True)
    for x in block.replace("\\\n", "").splitlines()
  ]


SHORTER = (
  *("--training.steps", "2", "--training.eval-sequences", "9"),
  *("--optimizer.warmup-steps", "1", "--training.no-eval-routing"),
)


@pytest.mark.usefixtures("quick_compiles")
def test_from_parquet_to_the_figures_of_a_test_set(run_command, tmp_path):
  """The commands as they stand, with a smaller model and fewer updates."""
  write_fineweb_edu(tmp_path / "fineweb-edu", 300)
  prepare, pretrain, evaluate = commands_with("train.prepare_data build")
  assert "300 documents" in run_command(prepare)
  smaller = ("--model.num-layers", "4", "--model.width", "32")
  printed = run_command(pretrain, *SHORTER, *smaller)
  assert re.search(r"^test: +[\d.]+ bits per byte", printed, re.M), printed
  printed = run_command(evaluate)
  assert re.search(r"split test: (\d+) of \1 rows", printed), printed
  assert (tmp_path / "test.json").exists()


@pytest.mark.usefixtures("quick_compiles")
def test_from_a_pretrained_model_to_a_routed_one(run_command, corpus, tmp_path):
  """The commands as they stand, on a small model and another corpus."""
  download, *commands = commands_with("train.convert import")
  assert download == ["make", "smollm2"]
  testing.write_model(tmp_path / "runs/smollm2", num_layers=4)
  more = {
    "train.finetune": (
      *SHORTER,
      *("--data.dataset", corpus, "--data.data-dir", tmp_path / "data"),
      *("--data.sequence-length", "32", "--training.batch-size", "4"),
    ),
    "train.analyze": ("--rows", "4"),
    "train.generate": ("--max-new-tokens", "3"),
  }
  printed = [run_command(x, *more.get(x[2], ())) for x in commands]
  for text, part in zip(
    printed,
    (
      "float32: equal bit for bit",
      "after 2 updates",
      "numbers   runs/finetune-routing/routing.json",
      "def ",
      "written   runs/exported",
    ),
    strict=True,
  ):
    assert part in text, text
  exported = deltajax.load_pretrained(tmp_path / "runs/exported").config
  assert exported.routing.gate == "scalar"
