"""What is missing is told with the command that installs it."""

import ast
import importlib.metadata
import re
import sys
import tomllib

import pytest

from deltajax import extras
from tests.helpers import ROOT, run_module

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_copy_is_installed_by_its_place_and_a_release_by_its_name(
  monkeypatch, tmp_path
):
  assert extras.install("eval") == (
    "pip install '.[eval]' in the copy of the repository"
  )
  monkeypatch.setattr(extras, "_BESIDE_THE_PACKAGE", tmp_path / "none")
  assert extras.install("eval") == "pip install 'deltajax[eval]'"


def calls_of_install():
  """What `install(...)` is called with, in all of the repository."""
  for path in [*ROOT.glob("deltajax/**/*.py"), *ROOT.glob("train/*.py")]:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "install":
        yield path, ast.literal_eval(node.args[0])


def test_extras_that_are_named_exist():
  found = list(calls_of_install())
  assert len(found) > 5
  for path, extra in found:
    assert extra in PROJECT["optional-dependencies"], path


OF_USERS = ("data", "train", "pretrained", "analysis", "eval", "wandb", "tpu")
# Works with less than the extra `train`.
LIGHT = {"convert", "generate"}
HIDING = """
import sys


class Hidden:
  def find_spec(self, name, *unused):
    if name.partition(".")[0] in {names!r}:
      raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden())
"""


def requirement(name):
  """The name of a requirement, as they are compared."""
  return re.match(r"[\w-]+", name)[0].lower().replace("_", "-")


def packages_of_extras():
  """What extras bring, by the names with which it is imported."""
  asked = {
    requirement(x)
    for extra in OF_USERS
    for x in PROJECT["optional-dependencies"][extra]
  }
  # What Flax and Optax bring, and without JAX there is nothing.
  asked -= {"deltajax", "jax", "orbax-checkpoint", "absl-py"}
  return {
    name
    for name, brought_by in importlib.metadata.packages_distributions().items()
    if asked & set(map(requirement, brought_by))
  }


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
  """Variables of processes that see no package of any extra."""
  names = packages_of_extras()
  assert {"grain", "safetensors", "tensorflow_datasets"} <= names
  directory = tmp_path_factory.mktemp("core")
  (directory / "sitecustomize.py").write_text(HIDING.format(names=names))
  return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize(
  "command",
  sorted(
    path.stem
    for path in (ROOT / "train").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text()
  ),
)
def test_a_command_that_lacks_an_extra_says_how_to_install_it(
  command, core_alone
):
  done = run_module(f"train.{command}", "--help", env=core_alone)
  if command in LIGHT:
    assert done.returncode == 0, done.stderr
    return
  assert done.returncode == 2, done.stderr
  assert re.fullmatch(
    r"error: this command needs \w+: pip install '\.\[train\]' in the copy of"
    r" the repository\.\n",
    done.stderr,
  )


def test_other_modules_that_are_missing_are_shown_as_they_are(tmp_path):
  """In a config of the user's, or in ours: a traceback says where."""
  (tmp_path / "sitecustomize.py").write_text(HIDING.format(names={"tyro"}))
  environment = {"PYTHONPATH": str(tmp_path)}
  done = run_module("train.pretrain", "--help", env=environment)
  assert done.returncode == 1
  assert "Traceback" in done.stderr
  assert "No module named 'tyro'" in done.stderr


def test_what_is_imported_is_declared():
  """And not only there because something else brings it."""
  extras_of_users = (PROJECT["optional-dependencies"][x] for x in OF_USERS)
  declared = {
    requirement(x)
    for asked in (PROJECT["dependencies"], *extras_of_users)
    for x in asked
  }
  brought_by = importlib.metadata.packages_distributions()
  for path in [*ROOT.glob("deltajax/**/*.py"), *ROOT.glob("train/*.py")]:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [x.name for x in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module]
      else:
        continue
      for name in {x.partition(".")[0] for x in names}:
        if name in sys.stdlib_module_names or name in ("deltajax", "train"):
          continue
        found = {requirement(x) for x in brought_by.get(name, [name])}
        assert found & declared, f"{path}: {name}"
