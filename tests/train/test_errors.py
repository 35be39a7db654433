"""Every kind of bad input is told in one message: the value, and the remedy.

The rows are in bad_options.py and bad_subjects.py. Names in capital letters are
those of places.py; OUT is new for each row.
"""

import importlib
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest

from deltajax.training.stopping import INTERRUPTED, USAGE_ERROR
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


RESUMES = {
  "analyze": False,
  "compare configs/compare_rd.py": True,
  "compile_ahead configs/quickstart.py": False,
  "convert import": False,
  "evaluate": False,
  "finetune configs/finetune_smollm2.py --init-from MODEL": True,
  "generate": False,
  "prepare_data build": True,
  "prepare_data inspect": False,
  "pretrain configs/quickstart.py": True,
  "study configs/study_small.py": True,
}


@pytest.mark.parametrize("line", RESUMES)
def test_an_interrupted_command_goes_on_only_if_it_does(
  line, places, monkeypatch, capfd
):
  """As `python -m` starts it: Ctrl-C while it reads its options."""
  monkeypatch.chdir(ROOT)
  command, *arguments = shlex.split(placed(line, places, ""))
  monkeypatch.setattr("tyro.cli", mock.Mock(side_effect=KeyboardInterrupt))
  monkeypatch.setattr(sys, "argv", [command, *arguments])
  monkeypatch.delitem(sys.modules, f"train.{command}", raising=False)
  with pytest.raises(SystemExit) as raised:
    runpy.run_module(f"train.{command}", run_name="__main__")
  assert raised.value.code == INTERRUPTED
  more = "; the same command goes on" if RESUMES[line] else ""
  assert capfd.readouterr().err == f"interrupted{more}\n"


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
