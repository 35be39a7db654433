"""What is said of the package; `make package` builds and installs it."""

import ast
import importlib.metadata
import re
import tomllib

import deltajax
from tests.helpers import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_has_one_place():
  assert "version" not in PROJECT
  assert PROJECT["dynamic"] == ["version"]
  named = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
  assert named == "deltajax.__version__"
  # A literal, so that a build need not import JAX.
  tree = ast.parse((ROOT / "deltajax/__init__.py").read_text())
  (value,) = [
    ast.literal_eval(node.value)
    for node in tree.body
    if isinstance(node, ast.Assign)
    and ast.unparse(node.targets[0]) == "__version__"
  ]
  assert value == deltajax.__version__
  assert importlib.metadata.version("deltajax") == value


def test_the_changelog_begins_with_it():
  text = (ROOT / "CHANGELOG.md").read_text()
  newest = re.search(r"^## (\S+)", text, re.MULTILINE)
  assert newest[1] == deltajax.__version__


def test_types_and_licence_go_along():
  assert (ROOT / "deltajax/py.typed").exists()
  assert PYPROJECT["tool"]["setuptools"]["package-data"]["deltajax"] == [
    "py.typed"
  ]
  assert PROJECT["license-files"] == ["LICENSE"]
  assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_extra_of_a_user_is_checked_by_make_package():
  of_developers = {"test", "reference", "docs", "dev"}
  script = (ROOT / ".ci/package").read_text()
  checked = set(re.search(r'^extras="(.*)"$', script, re.MULTILINE)[1].split())
  assert checked == PROJECT["optional-dependencies"].keys() - of_developers
