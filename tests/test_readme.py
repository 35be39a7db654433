"""Commands of the README run, as they stand."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
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
  """The commands of the block of the README that has this text."""
  blocks = re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
  (block,) = [x for x in blocks if text in x]
  return [shlex.split(x) for x in block.replace("\\\n", "").splitlines()]


def test_from_parquet_to_the_figures_of_a_test_set(tmp_path):
  """The commands as they stand, with a smaller model and fewer updates."""
  write_fineweb_edu(tmp_path / "fineweb-edu", 300)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  shorter = {
    "train.pretrain": (
      *("--training.steps", "2", "--training.eval-sequences", "9"),
      *("--model.num-layers", "4", "--model.width", "32"),
      *("--optimizer.warmup-steps", "1", "--training.no-eval-routing"),
    ),
  }

  def run(command):
    assert command[:2] == ["python", "-m"]
    done = subprocess.run(
      [sys.executable, *command[1:], *shorter.get(command[2], ())],
      cwd=tmp_path,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  prepare, pretrain = commands_with("train.prepare_data build")
  assert "300 documents" in run(prepare)
  printed = run(pretrain)
  found = re.search(r"^test: +([\d.]+) .*over 9 of (\d+) rows$", printed, re.M)
  assert found, printed
  evaluations = commands_with("runs/own --split test")
  (evaluate,) = [x for x in evaluations if "test" in x]
  printed = run(evaluate)
  assert f"split test: {found[2]} of {found[2]} rows" in printed
  assert (tmp_path / "test.json").exists()
