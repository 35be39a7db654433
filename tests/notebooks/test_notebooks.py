"""Notebooks run from top to bottom, small, and are stored without output."""

import builtins
import importlib.util
import os
import re
import tomllib

import pytest

from deltajax import testing
from tests.helpers import QUICK_FLAGS, ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = {
  path.stem: nbformat.read(path, as_version=4)
  for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
# What follows the cell of settings; {TMP} is a directory of the test.
SETTINGS = {
  "quickstart": """
DATASET = "{TMP}/texts/"
LAYERS, WIDTH = 4, 16
STEPS, BATCH_SIZE, SEQUENCE_LENGTH = 12, 4, 32
NEW_TOKENS = 20
""",
  "convert_and_finetune": """
MODEL = "{TMP}/model"
DATASET = "{TMP}/texts/"
BLOCKS = 3
STEPS, BATCH_SIZE, SEQUENCE_LENGTH = 4, 2, 32
EVAL_SEQUENCES, NEW_TOKENS = 4, 10
PROMPT = "value_1 ="
""",
  "look_inside": """
DATASET = "{TMP}/texts/"
VARIANTS = ("standard", "attnres_block", "rd_delta_block")
LAYERS, WIDTH, BLOCKS = 2, 16, 2
STEPS, BATCH_SIZE, SEQUENCE_LENGTH = 10, 4, 32
EVAL_SEQUENCES = 8
""",
  "bring_your_own_model": """
LAYERS, WIDTH, LENGTH = 2, 16, 32
STEPS, BATCH_SIZE = 10, 4
""",
}


def tagged(notebook, tag):
  (cell,) = [c for c in notebook.cells if tag in c.metadata.get("tags", ())]
  return cell


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(name, directory):
  """The notebook with small settings, as it is after it has run."""
  testing.write_corpus(directory / "texts")
  if "{TMP}/model" in SETTINGS[name]:
    testing.write_model(directory / "model", num_layers=3)
  notebook = nbformat.from_dict(NOTEBOOKS[name])
  cells = list(notebook.cells)
  settings = nbformat.v4.new_code_cell(
    SETTINGS[name].replace("{TMP}", str(directory))
  )
  cells.insert(1 + cells.index(tagged(notebook, "parameters")), settings)
  notebook = nbformat.from_dict(notebook | {"cells": cells})
  client = nbclient.NotebookClient(
    notebook,
    timeout=170,
    kernel_name="python3",
    resources={"metadata": {"path": str(directory)}},
  )
  # Nothing is fetched or installed.
  environment = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": QUICK_FLAGS,
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
  }
  client.execute(env=os.environ | environment)
  return notebook


def printed(cell):
  return "".join(x.text for x in cell.outputs if x.output_type == "stream")


def pictures(notebook):
  return [
    kind
    for cell in code_cells(notebook)
    for output in cell.outputs
    for kind in output.get("data", {})
    if kind.startswith("image/")
  ]


def test_there_are_settings_for_each():
  assert SETTINGS.keys() == NOTEBOOKS.keys()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_as_written(name):
  """Without outputs, counters and what editors leave behind."""
  notebook = NOTEBOOKS[name]
  nbformat.validate(notebook)
  assert notebook.nbformat == 4
  assert notebook.metadata == {
    "accelerator": "GPU",
    "kernelspec": {
      "display_name": "Python 3",
      "language": "python",
      "name": "python3",
    },
    "language_info": {"name": "python"},
  }
  ids = [cell.id for cell in notebook.cells]
  assert len(set(ids)) == len(ids)
  assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", x) for x in ids), ids
  for cell in notebook.cells:
    tags = ["parameters"] if cell.id == "parameters" else []
    assert cell.metadata == ({"tags": tags} if tags else {})
    assert cell.source.strip() == cell.source
    assert cell.source
  for cell in code_cells(notebook):
    assert not cell.outputs, cell.id
    assert cell.execution_count is None


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_settings_exist(name):
  """What the tests set is set in the notebook, and by that cell."""
  names = re.compile(r"\b([A-Z][A-Z_]+)\b(?=[A-Z_, ]* = )")
  own = names.findall(tagged(NOTEBOOKS[name], "parameters").source)
  assert set(names.findall(SETTINGS[name])) <= set(own)


class FakeShell:
  """Takes the magic commands of a cell."""

  def __init__(self):
    self.commands = []

  def run_line_magic(self, name, line):
    self.commands.append((name, line))


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_what_is_missing(
  name, on_a_gpu, monkeypatch, capsys, tmp_path
):
  from IPython.core.inputtransformer2 import TransformerManager

  first = code_cells(NOTEBOOKS[name])[0]
  code = TransformerManager().transform_cell(first.source)
  shell = FakeShell()
  found = importlib.util.find_spec
  monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
  monkeypatch.setattr("shutil.which", lambda name: "there" if on_a_gpu else "")
  exec(code, {})
  assert not shell.commands  # deltajax is there.
  assert "versions  Python" in capsys.readouterr().out

  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name == "deltajax" else found(name),
  )
  names = {}
  monkeypatch.chdir(tmp_path)
  exec(code, names)
  ((magic, line),) = shell.commands  # A release.
  assert magic == "pip"
  (extras,) = re.findall(r'install .*"\{SOURCE\}\[([a-z,]+)\]"', line)
  assert names["SOURCE"] == "deltajax"
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert set(extras.split(",")) <= project["optional-dependencies"].keys()
  assert names["JAX"] == ("jax[cuda12]" if on_a_gpu else "jax")
  assert '"{JAX}"' in line
  for version in ("0.1.0", "0.2.0"):  # Of uploaded wheels, the newest.
    wheel = f"deltajax-{version}-py3-none-any.whl"
    (tmp_path / wheel).write_bytes(b"")
    exec(code, names)
    assert names["SOURCE"] == wheel
  monkeypatch.chdir(ROOT / "notebooks")
  exec(code, names)
  assert names["SOURCE"] == ".."  # The copy that the notebook lies in.


def output_of(notebook, cell_id):
  (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
  return printed(cell)


def shows_loss_sample_and_routing(notebook):
  assert "12 updates" in output_of(notebook, "bits")
  assert output_of(notebook, "sample").startswith("def ")
  assert pictures(notebook).count("image/png") == 3
  assert pictures(notebook).count("image/svg+xml") == 1


def conversion_changes_nothing_and_training_does(notebook):
  logit, difference = re.findall(
    r"largest \w+ +([\d.e+-]+)", output_of(notebook, "proof")
  )
  assert float(difference) <= 1e-6 * float(logit)
  probes = output_of(notebook, "probe").splitlines()
  exact = [line for line in probes if "gate scalar" in line]
  assert len(exact) == 2
  assert all("equal bit for bit" in line for line in exact)
  (other,) = [line for line in probes if line.startswith("delta_block_closed")]
  assert float(re.search(r"differ by up to ([\d.e-]+)", other)[1]) > 0.01
  rows = re.findall(
    r"^\w+ +([\d.]+) +([\d.]+) +(-?[\d.]+)$",
    output_of(notebook, "compare"),
    re.M,
  )
  (standard, routed) = [[float(x) for x in row] for row in rows]
  assert standard[0] == pytest.approx(routed[0], abs=2e-4)
  assert standard[2] != 0 != routed[2]
  assert "gates from" in output_of(notebook, "inside")


def looks_into_every_variant(notebook):
  lines = output_of(notebook, "analyze").splitlines()
  names = [line.split()[0] for line in lines[1:]]
  assert names == ["standard", "attnres_block", "rd_delta_block"]
  (cell,) = [cell for cell in notebook.cells if cell.id == "schedules"]
  assert cell.outputs[0].data["text/html"].count("<svg") == len(names)


def starts_as_the_standard_model(notebook):
  logit, difference = re.findall(
    r"largest \w+ +([\d.e+-]+)", output_of(notebook, "identity")
  )
  assert float(difference) < 1e-3 * float(logit)
  first, last = re.findall(
    r"loss ([\d.]+) -> ([\d.]+)", output_of(notebook, "nnx")
  )[0]
  assert float(last) < float(first)


CHECKS = {
  "quickstart": shows_loss_sample_and_routing,
  "convert_and_finetune": conversion_changes_nothing_and_training_does,
  "look_inside": looks_into_every_variant,
  "bring_your_own_model": starts_as_the_standard_model,
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_from_top_to_bottom(name, tmp_path):
  notebook = executed(name, tmp_path)
  first = printed(code_cells(notebook)[0])
  for what in ("versions  Python 3", "devices   1 x cpu", "dtype     float32"):
    assert what in first
  assert "WARNING   JAX" in first
  assert "image/png" in pictures(notebook)
  for cell in code_cells(notebook):
    errors = [x.text for x in cell.outputs if x.get("name") == "stderr"]
    assert not errors, cell.id
  CHECKS[name](notebook)


def test_a_model_of_ones_own_has_less_than_40_lines():
  cells = NOTEBOOKS["bring_your_own_model"].cells
  (cell,) = [cell for cell in cells if cell.id == "model"]
  source = cell.source[cell.source.index("class ") :]
  assert "depth_attention(" in source
  assert "DepthState" in source
  assert "TransformerLM" not in cell.source
  lines = [line for line in source.splitlines() if line.strip()]
  assert len(lines) < 40
