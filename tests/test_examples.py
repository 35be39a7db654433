"""Every export has an example in its docstring, and examples run."""

import doctest
import inspect
import sys

import pytest

import deltajax
from deltajax import environment, routing, testing
from deltajax.models import presets
from deltajax.routing import variants

OWN_DOCS = {"VARIANTS": variants, "presets": presets.Presets}


def exports():
  """Name -> what has its docstring, and the module where that is."""
  found = {}
  for module in (deltajax, routing, testing, environment):
    for name, value in vars(module).items():
      defined = inspect.getmodule(value)
      if name.startswith("_") or inspect.ismodule(value):
        continue
      if module in (testing, environment) and defined is not module:
        continue
      value = OWN_DOCS.get(name, value)
      home = value if inspect.ismodule(value) else inspect.getmodule(value)
      found[name] = (value, home)
  return found


EXPORTS = exports()
# Written to, or shown with a result of those that are.
NO_EXAMPLE = {"Environment", "write_corpus", "write_tokenizer", "write_model"}


def test_all_exports_are_found():
  assert {"depth_attention", "load_pretrained", "presets"} <= EXPORTS.keys()
  assert {"read_together", "VARIANTS", "tiny_config"} <= EXPORTS.keys()


@pytest.mark.parametrize("name", EXPORTS)
def test_examples_run(name, capsys):
  if name in ("load_pretrained", "save_pretrained"):
    pytest.importorskip("safetensors")
  value, home = EXPORTS[name]
  globs = dict(vars(sys.modules[home.__name__]))
  test = doctest.DocTestParser().get_doctest(
    inspect.getdoc(value) or "", globs, name, home.__file__, 0
  )
  assert bool(test.examples) != (name in NO_EXAMPLE)
  runner = doctest.DocTestRunner()
  runner.run(test)
  failed = runner.summarize(verbose=False).failed
  assert not failed, capsys.readouterr().out


def test_examples_can_fail(capsys):
  test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "", "", 0)
  runner = doctest.DocTestRunner()
  runner.run(test)
  assert runner.summarize(verbose=False).failed == 1
  assert "Expected" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXPORTS)
def test_docstrings_are_whole(name):
  """Every argument of a function is described, and results are named."""
  value, _ = EXPORTS[name]
  if not inspect.isfunction(value):
    return
  text = inspect.getdoc(value)
  arguments = inspect.signature(value).parameters
  if len(arguments) > 1:
    for argument in arguments:
      assert f"{argument}:" in text, argument
