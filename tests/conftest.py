"""Settings and data of the whole suite."""

import importlib
import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Many tests, and the processes that they start, compile the same programs.
# Workers inherit the directory; the process that made it removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _cache = tempfile.TemporaryDirectory(prefix="deltajax-tests-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import pytest


@pytest.fixture
def quick_compiles():
  """Slower programs that are compiled several times faster."""
  import jax

  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
  """Runs a documented command in a directory that has the recipes."""
  from tests.helpers import ROOT

  (tmp_path / "configs").symlink_to(ROOT / "configs")
  monkeypatch.chdir(tmp_path)

  def run(words, *more):
    assert words[:2] == ["python", "-m"]
    module = importlib.import_module(words[2])
    module.command([*words[3:], *map(str, more)])
    return capsys.readouterr().out

  return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
  """A prepared TFDS directory with a small corpus of Python files."""
  from deltajax.testing import write_corpus
  from tests.helpers import build_corpus

  root = tmp_path_factory.mktemp("corpus") / "sources"
  write_corpus(root, suffix="py")
  return build_corpus(root, root.parent / "data")


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory) -> pathlib.Path:
  """A directory with a tokenizer.json like GPT-2's."""
  pytest.importorskip("tokenizers")
  from deltajax.testing import write_tokenizer

  return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
