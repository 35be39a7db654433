"""What `--help` prints: how to start, what for, every option; 80 columns."""

import importlib
import pathlib
import shlex

import pytest

from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study
from deltajax.config import RunConfig
from tests.helpers import ROOT
from tests.train.places import MODELS
from train.config_files import COMMANDS, load_typed, overview

# A command -> what its help has to name.
HELP = {
  "pretrain": "configs/quickstart.py",
  "pretrain configs/quickstart.py": "--model.routing.key-dim --training.steps"
  " --optimizer.query-multiplier --workdir embedding_skip_scaled",
  "finetune": "configs/finetune_smollm2.py --init-from",
  "finetune configs/finetune_smollm2.py": "--init-from RUN_OR_DIR --workdir",
  f"finetune configs/finetune_smollm2.py --init-from {MODELS / 'llama-tied'}": (
    "--freeze --optimizer.routing-learning-rate"
  ),
  "convert": "import export inspect",
  "convert import": "DIR OUT --routing.variant --routing.gate",
  "convert export": "RUN_OR_DIR OUT --layout --like",
  "convert inspect": "RUN_OR_DIR",
  "generate": "RUN_OR_DIR --prompt --top-k",
  "prepare_data": "build inspect",
  "prepare_data build": "OUT --sources --sequence-length --validation",
  "prepare_data inspect": "DIR --rows",
  "compile_ahead": "configs/paper_7_6b.py --topology",
  "compile_ahead configs/quickstart.py": "--topology --json --mesh.fsdp",
  "compare": "configs/compare_rd.py --out",
  "compare configs/compare_rd.py": "--arms --seeds rd_frozen_v",
  "study": "configs/study.py --document",
  "study configs/study.py": "--out --seeds --document",
  "evaluate": "RUN_OR_DIR --data --stride --tasks --mesh.data",
  "analyze": "RUN_OR_DIR --out --no-gradients",
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("line", HELP)
def test_help(line, capsys):
  command, *arguments = shlex.split(line)
  with pytest.raises(SystemExit) as raised:
    importlib.import_module(f"train.{command}").parse([*arguments, "--help"])
  assert raised.value.code == 0
  text = capsys.readouterr().out
  usage, about, *_ = text.split("\n\n")
  assert usage.startswith(f"usage: python -m train.{command}")
  assert about.endswith(".")
  for word in HELP[line].split():
    assert word in text, word
  for row in text.splitlines():
    # Paths of this test may be long.
    assert len(row) <= 80 or str(ROOT) in row, row
    assert "{None}" not in row
    assert "(default: )" not in row


def test_help_names_every_command():
  modules = {
    path.stem
    for path in pathlib.Path("train").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text()
  }
  # It is started by train.compare alone.
  assert {line.split()[0] for line in HELP} == modules - {"compare_run"}


@pytest.mark.parametrize(
  ("name", "kind"),
  [("RunConfig", RunConfig), ("Comparison", Comparison), ("Study", Study)],
)
def test_configs_are_listed_by_what_they_return(name, kind):
  listed = [x.split()[0] for x in overview(name) if x.startswith("  configs/")]
  assert listed
  for path in listed:
    load_typed(path, kind)


def test_every_config_is_listed_once():
  listed = [
    line.split()[0]
    for kind in COMMANDS
    for line in overview(kind)
    if line.startswith("  configs/")
  ]
  assert sorted(listed) == sorted(
    map(str, pathlib.Path("configs").glob("*.py"))
  )
