"""Every kind of bad input is told in one message: the value, and the remedy.

The rows are in bad_options.py and bad_subjects.py. Names in capital letters are
those of places.py; OUT is new for each row.
"""

import importlib
import re
import shlex
import sys

import pytest

from deltajax.training.stopping import USAGE_ERROR
from tests.helpers import ROOT, run_module
from tests.train import bad_options, bad_subjects
from tests.train.bad_options import Bad
from tests.train.places import Places
from train.cli import main

ROWS = {
  f"{table.lower()}: {name}": bad
  for module in (bad_options, bad_subjects)
  for table, rows in vars(module).items()
  if isinstance(rows, dict) and table.isupper()
  for name, bad in rows.items()
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, corpus, small_tokenizer):
  root = tmp_path_factory.mktemp("places")
  return Places(root, corpus, small_tokenizer)


def placed(text, places, out):
  """Replaces names of places by their paths."""
  return re.sub(
    r"\b[A-Z][A-Z0-9_]+\b",
    lambda x: (
      str(out) if x[0] == "OUT" else places[x[0]] if x[0] in places else x[0]
    ),
    text,
  )


def files(*directories):
  """All files with their sizes and times."""
  return {
    path: (path.stat().st_size, path.stat().st_mtime_ns)
    for directory in directories
    for path in directory.rglob("*")
    # What is finished of a corpus stays, for the same command to go on with.
    if path.is_file() and "out.partial" not in path.parts
  }


def run_here(module, arguments, monkeypatch, capfd):
  """Runs a command as `python -m` does; returns its exit code and stderr."""
  command = importlib.import_module(module).command
  monkeypatch.setattr(sys, "argv", [module, *arguments])
  with pytest.raises(SystemExit) as raised:
    main(command)
  return raised.value.code, capfd.readouterr().err


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_one_message(name, places, tmp_path, monkeypatch, capfd):
  bad: Bad = ROWS[name]
  if "--tasks" in bad.line:
    pytest.importorskip("lm_eval")
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("COLUMNS", "2000")  # Messages are not wrapped.
  line, value, remedy = (
    placed(text, places, tmp_path / "out")
    for text in (bad.line, bad.value, bad.remedy)
  )
  command, *arguments = shlex.split(line)
  before = files(tmp_path, places.root)
  capfd.readouterr()
  if bad.process:
    done = run_module(f"train.{command}", *arguments)
    code, errors = done.returncode, done.stderr
  else:
    code, errors = run_here(f"train.{command}", arguments, monkeypatch, capfd)
  assert code == USAGE_ERROR, errors
  message = re.sub(r"[│\s]+", " ", errors)
  assert value in message
  assert remedy in message
  assert "Traceback" not in errors
  assert files(tmp_path, places.root) == before
