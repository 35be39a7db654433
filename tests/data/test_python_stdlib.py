"""The standard library as a data set: stable, disjoint, complete or absent."""

import collections
import os
import sys

import pytest
import tensorflow_datasets as tfds

from deltajax.data import python_stdlib, storage
from deltajax.data.python_stdlib import PythonStdlib
from deltajax.routing.validation import ConfigError
from tests.helpers import build_corpus as build


def write_files(root, texts):
  """Writes {relative path: str or bytes} below `root`."""
  for name, content in texts.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(raw)
  return root


def read(directory):
  """Returns {split: [(path, text), ...]} in stored order."""
  builder = tfds.builder_from_directory(directory)
  return {
    split: [
      (record["path"].decode(), record["text"].decode())
      for record in builder.as_data_source(split)
    ]
    for split in builder.info.splits
  }


def many(count):
  return {f"pkg{i % 7}/m{i}.py": f"x = {i}\n" for i in range(count)}


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
  data_dir = tmp_path_factory.mktemp("stdlib")
  directory = storage.build_dataset(PythonStdlib, data_dir)
  return directory, read(directory)


def test_stdlib_holds_known_modules_and_no_packages(stdlib):
  _, splits = stdlib
  texts = {path: text for docs in splits.values() for path, text in docs}
  assert "import" in texts["json/__init__.py"]
  with open(os.__file__, encoding="utf-8") as file:
    assert texts["os.py"] == file.read()
  assert not [path for path in texts if "-packages/" in path]


def test_stdlib_splits_are_disjoint_by_content_and_about_90_5_5(stdlib):
  _, splits = stdlib
  texts = [text for docs in splits.values() for _, text in docs]
  assert len(set(texts)) == len(texts)
  assert set(splits) == set(python_stdlib.SPLITS)
  assert 0.85 < len(splits["train"]) / len(texts) < 0.95
  assert 0.02 < len(splits["validation"]) / len(texts) < 0.09
  assert 0.02 < len(splits["test"]) / len(texts) < 0.09


def test_stdlib_directory_names_the_interpreter(stdlib):
  directory, _ = stdlib
  version = ".".join(map(str, sys.version_info[:3]))
  assert version in directory.parts[-2]
  assert directory.parts[-3] == "python_stdlib"


def test_nothing_but_the_data_set_is_left_in_data_dir(stdlib):
  directory, _ = stdlib
  data_dir = directory.parents[2]
  assert os.listdir(data_dir) == ["python_stdlib"]
  assert len(os.listdir(directory.parent)) == 1


def test_same_files_give_the_same_records_in_the_same_order(tmp_path):
  root = write_files(tmp_path / "a", many(120))
  # Written in another order, in another place.
  copy = write_files(tmp_path / "b", dict(reversed(many(120).items())))
  first, second = build(root, tmp_path / "d1"), build(copy, tmp_path / "d2")
  assert read(first) == read(second)
  for file in sorted(first.iterdir()):
    assert file.read_bytes() == (second / file.name).read_bytes()


def test_documents_stay_in_their_split_when_others_come_or_move(tmp_path):
  before = read(build(write_files(tmp_path / "a", many(120)), tmp_path / "d1"))
  more = {f"moved/{name}": text for name, text in many(200).items()}
  after = read(build(write_files(tmp_path / "b", more), tmp_path / "d2"))
  for split in before:
    old, new = ({t for _, t in docs[split]} for docs in (before, after))
    assert old
    assert old <= new


def test_duplicates_are_dropped_and_the_first_path_is_kept(tmp_path):
  texts = {**many(60), "a_copy.py": "x = 3\n", "zz/copy.py": "x = 3\n"}
  docs = read(build(write_files(tmp_path / "a", texts), tmp_path / "d"))
  counts = collections.Counter(t for split in docs.values() for _, t in split)
  assert set(counts.values()) == {1}
  assert len(counts) == 60
  paths = {p for split in docs.values() for p, t in split if t == "x = 3\n"}
  assert paths == {"a_copy.py"}


def test_skips_blank_undecodable_installed_and_other_files(tmp_path):
  texts = {
    "good.py": "é = 1\n",
    "empty.py": "",
    "blank.py": " \n",
    "latin.py": "é = 1\n".encode("latin-1"),
    "site-packages/x.py": "installed = 1\n",
    "sub/dist-packages/y/z.py": "installed = 2\n",
    "notes.txt": "text\n",
  }
  root = write_files(tmp_path / "a", texts)
  (root / "dangling.py").symlink_to(root / "nowhere")
  docs = read(build(root, tmp_path / "d"))
  assert [doc for split in docs.values() for doc in split] == [
    ("good.py", "é = 1\n")
  ]


def test_a_finished_data_set_is_not_built_again(tmp_path, monkeypatch):
  root = write_files(tmp_path / "a", many(30))
  first = build(root, tmp_path / "d")
  monkeypatch.setattr(PythonStdlib, "_split_generators", None)
  assert build(root, tmp_path / "d") == first


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
  root = write_files(tmp_path / "a", many(30))

  def fail_half_way(self, documents):
    yield documents[0].digest, {"path": "p", "text": "t"}
    raise OSError("disk full")

  with monkeypatch.context() as patch:
    patch.setattr(PythonStdlib, "_generate_examples", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
      build(root, tmp_path / "d")
  assert os.listdir(tmp_path / "d") == []
  assert sum(map(len, read(build(root, tmp_path / "d")).values())) == 30


def test_empty_root_raises_and_leaves_nothing(tmp_path):
  root = write_files(tmp_path / "a", {"empty.py": "", "notes.txt": "text"})
  with pytest.raises(ConfigError, match=f"corpus is empty.*{root}"):
    build(root, tmp_path / "d")
  with pytest.raises(ConfigError, match=r"corpus is empty.*nowhere"):
    build(tmp_path / "nowhere", tmp_path / "d")
  assert os.listdir(tmp_path / "d") == []


def test_too_large_a_root_is_refused_before_tensorflow_is_needed(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(python_stdlib, "_MAX_SPLIT_BYTES", 100)
  root = write_files(tmp_path / "a", many(60))
  with pytest.raises(ConfigError, match=r"'train' has .* at most 100 without"):
    build(root, tmp_path / "d")
