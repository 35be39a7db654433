"""Packed data sets hold what packing in memory gives, and are made once."""

import os
import shutil

import numpy as np
import pytest

from deltajax.data import packing, storage
from deltajax.data.packed_dataset import open_packed, pack_texts, write_packed
from deltajax.data.packing import PackedSequences
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.routing.validation import ConfigError
from tests.helpers import build_corpus

T = 16


class Counting(ByteTokenizer):
  """Counts the texts that it encodes."""

  def __init__(self):
    self.encoded = 0

  def encode(self, text):
    self.encoded += 1
    return super().encode(text)


class OtherTokenizer(ByteTokenizer):
  fingerprint = "other"

  def encode(self, text):
    return super().encode(text.upper())


def make_texts(tmp_path, word="é"):
  root = tmp_path / "root"
  root.mkdir(exist_ok=True)
  for i in range(100):
    (root / f"m{i}.py").write_text(f"x = {i * i}  # {word}\n" * (1 + i % 7))
  return build_corpus(root, tmp_path / "texts")


@pytest.fixture
def texts(tmp_path):
  return make_texts(tmp_path)


def pack(texts, tmp_path, tokenizer=None, sequence_length=T):
  return pack_texts(
    texts,
    data_dir=tmp_path / "d",
    tokenizer=tokenizer or ByteTokenizer(),
    sequence_length=sequence_length,
  )


def assert_same_rows(rows, wanted):
  assert len(rows) == len(wanted)
  for row, other in zip(rows, wanted, strict=True):
    assert set(row) == set(other)
    for name, values in row.items():
      assert values.dtype == np.int32
      np.testing.assert_array_equal(values, other[name])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_equal_those_packed_in_memory(texts, tmp_path, split):
  stored = open_packed(pack(texts, tmp_path), split)
  wanted = PackedSequences.pack(
    map(ByteTokenizer().encode, storage.read_texts(texts, split)),
    tokenizer=ByteTokenizer(),
    sequence_length=T,
  )
  assert stored.info == wanted.info
  assert_same_rows(stored, wanted)


def test_shards_change_nothing(tmp_path, monkeypatch):
  documents = [np.arange(k % 40) for k in range(200)]
  options = {"tokenizer": ByteTokenizer(), "sequence_length": T}
  wanted = PackedSequences.pack(documents, **options)
  monkeypatch.setattr(packing, "TOKENS_PER_SHARD", 10 * (T + 1) + 5)
  write_packed(tmp_path, {"train": documents}, **options)
  assert len(list(tmp_path.glob("*array_record*"))) == -(-len(wanted) // 10) > 5
  stored = open_packed(tmp_path, "train")
  assert_same_rows(stored, wanted)
  assert stored.info == PackedSequences.pack(documents, **options).info


def test_packed_once(texts, tmp_path):
  first, again = Counting(), Counting()
  directory = pack(texts, tmp_path, first)
  assert pack(texts, tmp_path, again) == directory
  assert (first.encoded, again.encoded) == (100, 0)
  rows = open_packed(directory, "train")
  shutil.rmtree(texts)  # Nothing but the rows is needed any more.
  assert len(list(rows)) == len(rows)


def test_other_texts_tokenizers_and_lengths_are_other_data_sets(
  texts, tmp_path
):
  directories = [
    pack(texts, tmp_path),
    pack(texts, tmp_path, OtherTokenizer()),
    pack(texts, tmp_path, sequence_length=T + 1),
  ]
  shutil.rmtree(texts)
  directories.append(pack(make_texts(tmp_path, "è"), tmp_path))
  fingerprints = {open_packed(d, "train").info.fingerprint for d in directories}
  assert len(set(directories)) == len(fingerprints) == 4


def test_a_failed_packing_leaves_nothing(texts, tmp_path):
  class Failing(Counting):
    def encode(self, text):
      if self.encoded == 50:
        raise OSError("disk full")
      return super().encode(text)

  with pytest.raises(OSError, match="disk full"):
    pack(texts, tmp_path, Failing())
  assert os.listdir(tmp_path / "d") == []
  assert open_packed(pack(texts, tmp_path), "train").info.num_documents > 50


def test_directories_that_are_no_packed_data_set_raise(texts, tmp_path):
  with pytest.raises(ConfigError, match=r"1.0.0' is not a packed data set"):
    open_packed(texts, "train")
  with pytest.raises(ConfigError, match=r"has no dataset_info.json"):
    open_packed(tmp_path, "train")
  with pytest.raises(ConfigError, match="did you mean 'train'"):
    open_packed(pack(texts, tmp_path), "trian")


@pytest.mark.parametrize("how", ["cut", "emptied", "flipped"])
def test_a_damaged_shard_names_its_record(how, tmp_path, monkeypatch):
  monkeypatch.setattr(packing, "TOKENS_PER_SHARD", 10 * (T + 1))
  options = {"tokenizer": ByteTokenizer(), "sequence_length": T}
  write_packed(tmp_path, {"train": [np.arange(250)] * 3}, **options)
  file = tmp_path / "packed-train.array_record-00002-of-00005"
  raw = bytearray(file.read_bytes())
  if how == "flipped":
    raw[200:220] = bytes(20)
  file.write_bytes(raw[: {"cut": 2**15, "emptied": 0}.get(how)])
  rows = open_packed(tmp_path, "train")
  damaged = {}
  for k in range(len(rows)):
    try:
      rows[k]
    except OSError as error:
      damaged[k] = str(error)
  assert damaged
  for k, message in damaged.items():
    assert 20 <= k < 30
    assert message.startswith(f"record {k - 20} of {file} cannot be read: ")
  assert how == "flipped" or len(damaged) == 10


def test_missing_rows_are_noticed(texts, tmp_path, monkeypatch):
  directory = pack(texts, tmp_path)
  whole = storage.records
  monkeypatch.setattr(storage, "records", lambda *a: list(whole(*a))[:-1])
  with pytest.raises(ConfigError, match=r"'train' has \d+ rows; its metadata"):
    open_packed(directory, "train")
