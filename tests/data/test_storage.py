"""Data sets are built once by whoever is first, offline and quietly."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

import deltajax
from deltajax.data import storage
from deltajax.data.python_stdlib import PythonStdlib
from deltajax.routing.validation import ConfigError
from tests.helpers import build_corpus

REPOSITORY = os.path.dirname(
  os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)

# Builds and reads a data set; fails if anything reaches for the network.
BUILD = """
import pathlib, random, socket, sys
def refuse(*args, **kwargs):
  raise AssertionError("network access")
socket.socket.connect = socket.getaddrinfo = refuse
random.seed(0)
from deltajax.config import DataConfig
from deltajax.data import pipeline, python_stdlib, storage
root, data_dir = sys.argv[1:]
python_stdlib.library_root = lambda: pathlib.Path(root)
path = storage.build_dataset(python_stdlib.PythonStdlib, data_dir)
data = DataConfig(dataset=str(path), data_dir=data_dir, sequence_length=8)
source = pipeline.load_mixture(data, "train")
next(pipeline.train_iterator(source, batch_size=2, seed=0))
heavy = {name.split(".")[0] for name in sys.modules}
assert not heavy & {"tensorflow", "torch"}, heavy
print(source.info.fingerprint)
"""


def start(code, *args):
  return subprocess.Popen(
    [sys.executable, "-c", code, *map(str, args)],
    cwd=REPOSITORY,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.fixture
def root(tmp_path):
  directory = tmp_path / "root"
  directory.mkdir()
  for i in range(100):
    (directory / f"m{i}.py").write_text(f"x = {i}\n")
  return directory


@pytest.fixture
def dataset(root, tmp_path):
  return build_corpus(root, tmp_path / "d")


def test_processes_that_build_at_once_offline_quietly_agree(root, tmp_path):
  # All seed `random` alike, as the processes of one training run do.
  processes = [start(BUILD, root, tmp_path / "d") for _ in range(3)]
  results = [process.communicate(timeout=120) for process in processes]
  for process, (out, err) in zip(processes, results, strict=True):
    assert process.returncode == 0, err
    assert err == ""
    assert len(out.split()) == 1  # The fingerprint, no chatter.
  assert len({out for out, _ in results}) == 1
  assert sorted(os.listdir(tmp_path / "d")) == ["packed", "python_stdlib"]
  assert len(os.listdir(tmp_path / "d/packed")) == 1


def test_a_slower_builder_uses_the_result_of_the_faster(
  root, tmp_path, monkeypatch
):
  plain_rename = os.rename

  def late_rename(source, target):
    monkeypatch.setattr(os, "rename", plain_rename)
    build_corpus(root, tmp_path / "d")
    plain_rename(source, target)

  monkeypatch.setattr(os, "rename", late_rename)
  path = build_corpus(root, tmp_path / "d")
  assert os.rename is plain_rename  # The race took place.
  assert len(list(storage.read_texts(path, "train"))) > 50
  assert os.listdir(tmp_path / "d") == ["python_stdlib"]


def test_light_modules_need_neither_grain_nor_tfds():
  (light,) = re.findall(r"needed by (.*?);", deltajax.data.__doc__, re.DOTALL)
  modules = re.findall(r"`(\w+)`", light)
  assert {"packing", "tokenizers"} < set(modules)
  process = start(
    f"from deltajax.data import {', '.join(modules)}; import sys;"
    "loaded = {name.split('.')[0] for name in sys.modules};"
    "assert not loaded & {'grain', 'tensorflow_datasets', 'array_record'}"
  )
  _, err = process.communicate(timeout=60)
  assert process.returncode == 0, err


def test_data_dir_that_is_a_file_raises(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=r"/file.* cannot be written"):
    storage.build_dataset(PythonStdlib, tmp_path / "file")


def test_unknown_split_names_the_nearest_and_the_directory(dataset):
  with pytest.raises(ConfigError, match=r"1.0.0': .*'vali'.*'validation'"):
    list(storage.read_texts(dataset, "vali"))


def test_not_a_tfds_directory_says_what_is(dataset):
  with pytest.raises(ConfigError, match=r"no dataset_info.json"):
    list(storage.read_texts(dataset.parent, "train"))


def damaged(raw, how):
  """Truncated, or with flipped bits in what is compressed first."""
  return (
    raw[: len(raw) // 2]
    if how == "cut"
    else (raw[:200] + bytes(x ^ 0xFF for x in raw[200:220]) + raw[220:])
  )


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_files_are_named(dataset, how):
  (file,) = dataset.glob("*-train.array_record*")
  whole = list(storage.read_texts(dataset, "train"))
  file.write_bytes(damaged(file.read_bytes(), how))
  with pytest.raises(OSError, match=rf"record \d+ of {file} cannot be read: "):
    assert list(storage.read_texts(dataset, "train")) != whole


def test_missing_files_are_named(dataset):
  (file,) = dataset.glob("*-train.array_record*")
  file.unlink()
  with pytest.raises(ConfigError, match=f"{file} is missing"):
    list(storage.read_texts(dataset, "train"))


class _Other(tfds.core.GeneratorBasedBuilder):
  """A data set whose features are chosen by the test."""

  name = "other_for_tests"
  VERSION = tfds.core.Version("1.0.0")
  url_infos = None
  features = None
  example = None

  def _info(self):
    features = tfds.features.FeaturesDict(self.features)
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    yield 0, self.example


@pytest.mark.parametrize(
  ("features", "example", "message"),
  [
    ({"txt": tfds.features.Text()}, {"txt": "a"}, "'text'; .*'txt'"),
    ({"text": tfds.features.Scalar(np.int64)}, {"text": 1}, "hold strings"),
  ],
)
def test_records_without_text_raise(tmp_path, features, example, message):
  class Other(_Other):
    name = f"other_{next(iter(features))}"

  Other.features, Other.example = features, example
  path = storage.build_dataset(Other, tmp_path)
  with pytest.raises(ConfigError, match=message):
    list(storage.read_texts(path, "train"))
