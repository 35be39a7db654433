"""Models by a directory, or by their names on the hub."""

import fnmatch
import sys
import types

import pytest

from deltajax.checkpoints.hub import model_directory
from deltajax.config import ConfigError


@pytest.fixture
def hub(monkeypatch):
  """A hub of one model; remembers what it was asked for."""
  asked = []

  def snapshot_download(name, allow_patterns):
    asked.append((name, allow_patterns))
    if name != "org/model":
      raise ConnectionError("no such repository")
    return "/cache/model"

  module = types.SimpleNamespace(snapshot_download=snapshot_download)
  monkeypatch.setitem(sys.modules, "huggingface_hub", module)
  return asked


def test_a_directory_is_itself(hub, tmp_path):
  assert model_directory(tmp_path) == tmp_path
  assert model_directory(str(tmp_path)) == tmp_path
  assert not hub


def test_a_name_is_fetched(hub):
  assert str(model_directory("org/model")) == "/cache/model"
  ((_, patterns),) = hub

  def wanted(file):
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

  for file in (
    *("config.json", "model.safetensors", "model-00001-of-00002.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json"),
    *("tokenizer_config.json", "generation_config.json"),
  ):
    assert wanted(file), file
  for file in ("pytorch_model.bin", "README.md", "onnx/model.onnx"):
    assert not wanted(file), file


def test_what_is_neither_is_said(hub):
  with pytest.raises(
    ConfigError, match=r"no directory org/other.*: no such repository"
  ):
    model_directory("org/other")
  for name in ("nowhere", "/not/here", "a/b/c"):
    with pytest.raises(ConfigError, match=f"there is no directory {name};"):
      model_directory(name)
  assert len(hub) == 1


def test_without_the_library_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ConfigError, match=r"'.\[pretrained\]'"):
    model_directory("org/model")
