"""A prepared corpus holds its documents once, however it was made."""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
from unittest import mock

from hypothesis import given, HealthCheck, settings, strategies as st
import numpy as np
import pytest

from deltajax.data import (
  encoding,
  packing,
  prepare as prepare_module,
  prepare_tasks,
)
from deltajax.data.manifest import read_manifest
from deltajax.data.packed_dataset import open_packed, write_metadata
from deltajax.data.packing import PackedSequences
from deltajax.data.pipeline import load_split
from deltajax.data.prepare import Corpus, prepare
from deltajax.data.records import Reading
from deltajax.data.split_plan import Fractions, SPLITS
from deltajax.data.tokenizers import ByteTokenizer, get_tokenizer, TOKENIZERS
from deltajax.routing.validation import ConfigError
from tests.helpers import run_program
from train.prepare_data import summary_lines

T = 16
TOKENIZER = ByteTokenizer()


def make_texts(count, seed=0):
  rng = np.random.default_rng(seed)
  sizes = rng.choice([0, 1, T - 3, T - 2, T - 1, T, 10 * T], count)
  return ["".join(map(chr, rng.integers(65, 123, size))) for size in sizes]


def write_jsonl(file, texts):
  file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def sources(tmp_path):
  """Files of some 600 documents, one in ten of which occurs again."""
  directory = tmp_path / "sources"
  directory.mkdir()
  texts = make_texts(600)
  texts += texts[::10]
  for k in range(6):
    write_jsonl(directory / f"{k}.jsonl", texts[k::6])
  return directory


def corpus(*sources, **options):
  options = {
    "tokenizer": "bytes",
    "sequence_length": T,
    "fractions": Fractions(validation=0.1, test=0.2),
  } | options
  return Corpus(sources=tuple(map(str, sources)), **options)


def build(corpus, out, workers=0):
  lines = []
  manifest = prepare(corpus, out, workers=workers, log=lines.append)
  return manifest, lines


def texts_of(directory, split, tokenizer=TOKENIZER):
  """The documents in the rows of a split, in order."""
  rows = list(open_packed(directory, split))
  tokens = np.concatenate([row["tokens"] for row in rows])
  segments = np.concatenate([row["segment_ids"] for row in rows])
  tokens = tokens[segments > 0]
  begins = np.flatnonzero(tokens == tokenizer.bos_id)
  assert begins[0] == 0
  documents = np.split(tokens, begins[1:])
  for document in documents:
    assert document[-1] == tokenizer.eos_id
    assert not np.isin(document[1:-1], [tokenizer.bos_id]).any()
  return [tokenizer.decode(document[1:-1]) for document in documents]


def split_of(text):
  """As the manifest says it."""
  number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
  return "test" if number < 0.2 else "validation" if number < 0.3 else "train"


def content(directory):
  files = [path for path in directory.rglob("*") if path.is_file()]
  return {path.relative_to(directory): path.read_bytes() for path in files}


def read_lines(directory):
  return [
    json.loads(line)["text"]
    for file in sorted(directory.glob("*.jsonl"))
    for line in file.read_text().splitlines()
  ]


def test_every_document_is_once_where_its_text_says(sources, tmp_path):
  manifest, _ = build(corpus(sources), tmp_path / "out")
  read = read_lines(sources)
  distinct = list(dict.fromkeys(read))
  assert len(read) == 660 > len(distinct) > 400
  for split in SPLITS:
    wanted = [text for text in distinct if split_of(text) == split]
    assert texts_of(tmp_path / "out", split) == wanted
    info = manifest.splits[split]
    assert info == open_packed(tmp_path / "out", split).info
    assert info.num_documents == len(wanted)
    assert info.num_tokens == sum(len(text) + 2 for text in wanted)
  assert manifest.num_documents == len(read)
  assert manifest.duplicates == len(read) - len(distinct)
  assert manifest.num_tokens == sum(map(len, read))
  assert sorted(os.listdir(tmp_path)) == ["out", "sources"]


def test_rows_are_those_packed_in_memory(sources, tmp_path, monkeypatch):
  monkeypatch.setattr(packing, "TOKENS_PER_SHARD", 1000)
  build(corpus(sources), tmp_path / "out")
  assert len(list((tmp_path / "out").glob("*-train.*"))) > 10
  for split in SPLITS:
    texts = filter(
      lambda text: split_of(text) == split, dict.fromkeys(read_lines(sources))
    )
    wanted = PackedSequences.pack(
      map(TOKENIZER.encode, texts), tokenizer=TOKENIZER, sequence_length=T
    )
    stored = open_packed(tmp_path / "out", split)
    assert stored.info == wanted.info
    for row, other in zip(stored, wanted, strict=True):
      for name, values in row.items():
        np.testing.assert_array_equal(values, other[name])


SIZES = st.lists(
  st.sampled_from([0, 1, T - 3, T - 2, T - 1, T, 10 * T]), min_size=1
)


@settings(
  max_examples=15,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
  files=st.lists(SIZES, min_size=1, max_size=4),
  tokens=st.integers(1, 200),
  batch=st.integers(1, 99),
)
def test_no_token_is_lost(files, tokens, batch, tmp_path, monkeypatch):
  monkeypatch.setattr(packing, "TOKENS_PER_SHARD", tokens)
  monkeypatch.setattr(encoding, "_BYTES_AT_ONCE", batch)
  monkeypatch.setattr(encoding, "_TOKENS_AT_ONCE", batch)
  monkeypatch.setattr("deltajax.data.split_plan._DOCUMENTS_AT_ONCE", 2)
  for name in ("in", "out"):
    shutil.rmtree(tmp_path / name, ignore_errors=True)
  (tmp_path / "in").mkdir()
  texts = []
  for k, sizes in enumerate(files):
    some = [f"{k}.{j}".ljust(size)[:size] for j, size in enumerate(sizes)]
    write_jsonl(tmp_path / f"in/{k}.jsonl", some)
    texts += some
  whole = "one more, of a row at least"
  write_jsonl(tmp_path / "in/x.jsonl", [whole])
  only = Fractions(validation=0.0, test=0.0)
  manifest, _ = build(corpus(tmp_path / "in", fractions=only), tmp_path / "out")
  distinct = list(dict.fromkeys([*texts, whole]))
  assert texts_of(tmp_path / "out", "train") == distinct
  assert manifest.duplicates == len(texts) + 1 - len(distinct)
  assert list(manifest.splits) == ["train"]


def test_killed_before_each_change_it_comes_back_bit_for_bit(sources, tmp_path):
  work = tmp_path / "work"
  work.mkdir()
  done = run_program("tests/data/kill_program.py", sources, work)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 30


def test_finished_parts_are_not_encoded_again(sources, tmp_path, monkeypatch):
  class Counting(ByteTokenizer):
    encoded = 0

    def encode(self, text):
      Counting.encoded += 1
      if Counting.encoded == 300:
        raise OSError("No space left on device")
      return super().encode(text)

  monkeypatch.setitem(TOKENIZERS, "bytes", Counting)
  prepare_tasks._load_tokenizer.cache_clear()
  out = tmp_path / "out"
  with pytest.raises(OSError, match="No space left"):
    build(corpus(sources), out)
  assert not out.exists()
  build(corpus(sources), out)
  # Two files of 110 were finished, the third was begun again.
  assert Counting.encoded == 300 + 660 - 220
  prepare_tasks._load_tokenizer.cache_clear()
  monkeypatch.undo()
  build(corpus(sources), tmp_path / "other")
  assert content(out) == content(tmp_path / "other")


@contextlib.contextmanager
def largest_file(size):
  """A disk that is full, as far as Linux can pretend it."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(sources, tmp_path, monkeypatch):
  out = tmp_path / "out"
  monkeypatch.setattr(encoding, "_BYTES_AT_ONCE", 2**10)
  with (
    largest_file(2**11),
    pytest.raises(OSError, match=r"too large: '.*out.partial"),
  ):
    build(corpus(sources), out)
  # Rows take more than the documents of a file.
  with (
    largest_file(2**15),
    pytest.raises(OSError, match=r"too large; writing .*-train.array_record"),
  ):
    build(corpus(sources), out)
  assert not out.exists()
  build(corpus(sources), out)
  build(corpus(sources), tmp_path / "other")
  assert content(out) == content(tmp_path / "other")


def test_other_lengths_and_fractions_use_what_was_encoded(
  sources, tmp_path, monkeypatch
):
  out = tmp_path / "out"

  def fail(*args):
    raise OSError("not now")

  monkeypatch.setattr(prepare_module, "write_metadata", fail)
  with pytest.raises(OSError, match="not now"):
    build(corpus(sources), out)
  monkeypatch.undo()
  monkeypatch.setattr(encoding, "_write", fail)
  changed = corpus(sources, sequence_length=T + 1, fractions=Fractions())
  changed = dataclasses.replace(changed, fractions=Fractions(validation=0.3))
  build(changed, out)
  monkeypatch.undo()
  build(changed, tmp_path / "other")
  assert content(out) == content(tmp_path / "other")


def test_parts_that_are_not_whole_are_encoded_again(
  sources, tmp_path, monkeypatch
):
  def fail(*args):
    raise OSError("not now")

  out = tmp_path / "out"
  monkeypatch.setattr(prepare_module, "plan_splits", fail)
  with pytest.raises(OSError, match="not now"):
    build(corpus(sources), out)
  monkeypatch.undo()
  first, second, *_ = sorted((tmp_path / "out.partial/parts").iterdir())
  (first / "tokens").write_bytes(b"")
  (second / "notes.json").write_bytes(b"")
  build(corpus(sources), out)
  build(corpus(sources), tmp_path / "other")
  assert content(out) == content(tmp_path / "other")


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_shards_that_are_not_whole_are_written_again(
  sources, tmp_path, monkeypatch, how
):
  """As after a loss of power, when notes on them had reached the disk."""

  def fail(*args):
    raise OSError("not now")

  out = tmp_path / "out"
  monkeypatch.setattr(packing, "TOKENS_PER_SHARD", 1000)
  monkeypatch.setattr(prepare_module, "write_metadata", fail)
  with pytest.raises(OSError, match="not now"):
    build(corpus(sources), out)
  first, *_, last = sorted((tmp_path / "out.partial").glob("rows-*/*-train.*"))
  for file in (first, last):
    if how == "gone":
      file.unlink()
    else:
      file.write_bytes(file.read_bytes()[:-99])
  monkeypatch.setattr(prepare_module, "write_metadata", write_metadata)
  build(corpus(sources), out)
  build(corpus(sources), tmp_path / "other")
  assert content(out) == content(tmp_path / "other")


def test_notes_are_written_when_what_they_note_is_on_the_disk(
  sources, tmp_path, monkeypatch
):
  happened = []
  for module in (encoding, prepare_tasks):
    for name in ("flush", "write_file"):
      function = getattr(module, name)

      def noted(path, *args, name=name, function=function):
        happened.append((name, os.path.basename(path)))
        function(path, *args)

      monkeypatch.setattr(module, name, noted)
  build(corpus(sources / "0.jsonl"), tmp_path / "out")
  assert happened[:3] == [
    *(("flush", "index"), ("flush", "tokens")),
    ("write_file", "notes.json"),
  ]
  shards = happened[3:]
  assert len(shards) == 6
  for (one, name), (other, note) in zip(shards[::2], shards[1::2], strict=True):
    assert (one, other, name) == ("flush", "write_file", note)


class Killed(BaseException):
  pass


@pytest.mark.parametrize("place", ["open", "remove_unfinished"])
def test_a_kill_in_the_first_moments(sources, tmp_path, monkeypatch, place):
  def dies(*args):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(prepare_module, place, dies, raising=False)
    with pytest.raises(Killed):
      build(corpus(sources), tmp_path / "out")
  assert (tmp_path / "out.partial").is_dir()
  build(corpus(sources), tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_file_systems_without_locks_are_prepared_on(
  sources, tmp_path, monkeypatch, number
):
  monkeypatch.setattr(
    fcntl, "flock", mock.Mock(side_effect=OSError(number, "no locks"))
  )
  build(corpus(sources), tmp_path / "out")
  assert (tmp_path / "out").is_dir()


def test_a_lock_that_fails_is_not_another_process(
  sources, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    fcntl, "flock", mock.Mock(side_effect=OSError(errno.EIO, "disk"))
  )
  with pytest.raises(OSError, match="disk"):
    build(corpus(sources), tmp_path / "out")


def test_what_another_process_works_on_is_not_removed(sources, tmp_path):
  """Whether it prepares the same set, or has just finished."""
  out = tmp_path / "out"
  with prepare_module._scratch(out) as scratch:
    (scratch / "parts/one").mkdir()
    with pytest.raises(ConfigError, match="another process is preparing"):
      prepare(corpus(sources), out, workers=0, keep_refused=False)
    assert (scratch / "parts/one").is_dir()
    (scratch / "parts/one").rmdir()
  build(corpus(sources), out)
  with (
    prepare_module._scratch(out) as scratch,
    pytest.raises(ConfigError, match="another process is preparing"),
  ):
    build(corpus(sources), out)
  # What one left that was killed at its end goes with the next call.
  (scratch / "parts").mkdir(parents=True)
  (scratch / "lock").touch()
  build(corpus(sources), out)
  assert not scratch.exists()
  # Something else of that name stays.
  scratch.mkdir()
  (scratch / "thesis.tex").touch()
  build(corpus(sources), out)
  assert (scratch / "thesis.tex").exists()


def test_a_refused_corpus_of_which_nothing_is_kept(sources, tmp_path):
  huge = corpus(sources, sequence_length=10**6)
  for keep in (True, False):
    with pytest.raises(ConfigError, match="fewer than one row"):
      prepare(huge, tmp_path / "out", workers=0, log=print, keep_refused=keep)
    assert (tmp_path / "out.partial").exists() == keep


def test_documents_without_text_are_counted(tmp_path, sources):
  texts = tmp_path / "texts"
  texts.mkdir()
  for k in range(9):
    (texts / f"{k}.txt").write_text("" if k % 3 else f"text {k} " * 9)
  write_jsonl(tmp_path / "none.jsonl", [""])
  only = {"fractions": Fractions(validation=0.0, test=0.0)}
  wanted = corpus(texts, tmp_path / "none.jsonl", **only)
  manifest, _ = build(wanted, tmp_path / "out")
  assert manifest.num_documents == 10
  assert manifest.empty == 7
  assert [x.empty for x in manifest.sources] == [6, 1]
  assert ", 7 documents without text" in summary_lines(manifest)[0]
  for k in (0, 3, 6):
    (texts / f"{k}.txt").write_text("")
  with pytest.raises(
    ConfigError, match="the sources hold no text: 10 documents, all empty"
  ):
    build(wanted, tmp_path / "none")
  assert not (tmp_path / "none").exists()


def test_sources_without_a_document_are_named(tmp_path, sources):
  pa = pytest.importorskip("pyarrow")
  pq = pytest.importorskip("pyarrow.parquet")
  path = tmp_path / "none.parquet"
  pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
  manifest, _ = build(corpus(sources, path), tmp_path / "out")
  assert manifest.sources[-1].num_documents == 0
  (line,) = (x for x in summary_lines(manifest) if x.startswith("empty"))
  assert line.endswith(f"1 sources without a document, the first is {path}")
  with pytest.raises(ConfigError, match="hold no text: 0 documents"):
    build(corpus(path), tmp_path / "none")


def test_files_of_the_same_content(sources, tmp_path):
  shutil.copy(sources / "0.jsonl", sources / "9.jsonl")
  shutil.copy(sources / "0.jsonl", sources / "a.jsonl")
  manifest, _ = build(corpus(sources), tmp_path / "out")
  one, *_, two, three = manifest.sources
  assert one.sha256 == two.sha256 == three.sha256
  assert manifest.num_documents == 880
  distinct = dict.fromkeys(read_lines(sources))
  assert manifest.duplicates == 880 - len(distinct)


def test_done_is_done(sources, tmp_path):
  out = tmp_path / "out"
  first, _ = build(corpus(sources), out)
  before = content(out)
  again, lines = build(corpus(sources), out)
  assert again == first == read_manifest(out)
  assert f"written    {out}, before" in lines
  assert content(out) == before


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"sequence_length": 9}, "sequence_length 16; now it is 9: name another"),
    ({"reading": Reading(bad_records="skip")}, "with reading "),
    ({"fractions": Fractions(validation=0.2)}, "with fractions "),
    ({"kind": "text"}, r"other sources \(.*0.jsonl as jsonl, now as text\)"),
    ("append", r"other sources \(.*3.jsonl\)"),
    ("remove", r"other sources \(6 parts, now 5\)"),
  ],
)
def test_a_directory_of_other_data_is_left_alone(
  changes, message, sources, tmp_path
):
  out = tmp_path / "out"
  build(corpus(sources), out)
  before = content(out)
  options = changes if isinstance(changes, dict) else {}
  if changes == "append":
    with open(sources / "3.jsonl", "a") as file:
      file.write('{"text": "one more"}\n')
  elif changes == "remove":
    (sources / "5.jsonl").unlink()
  with pytest.raises(ConfigError, match=message):
    build(corpus(sources, **options), out)
  assert content(out) == before


def test_places_that_cannot_be_written(sources, tmp_path):
  (tmp_path / "out").mkdir()
  (tmp_path / "out/thesis.tex").write_text("")
  with pytest.raises(ConfigError, match="out holds something that is no"):
    build(corpus(sources), tmp_path / "out")
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="file holds something that is no"):
    build(corpus(sources), tmp_path / "file")
  with pytest.raises(ConfigError, match=r"b.partial cannot be written"):
    build(corpus(sources), tmp_path / "file/b")
  (tmp_path / "c.partial/x").mkdir(parents=True)
  with pytest.raises(ConfigError, match=r"c.partial holds something else"):
    build(corpus(sources), tmp_path / "c")
  with (
    prepare_module._scratch(tmp_path / "d"),
    pytest.raises(ConfigError, match="another process is preparing"),
  ):
    build(corpus(sources), tmp_path / "d")
  (tmp_path / "empty").mkdir()
  build(corpus(sources), tmp_path / "empty")


@pytest.mark.parametrize(
  ("texts", "options", "message"),
  [
    (["", ""], {}, "the sources hold no text: 2 documents, all empty"),
    (
      ["d" * 99],  # For training, says its hash.
      {},
      "split 'validation', 0.1 of 1 distinct documents: no document falls",
    ),
    (
      ["a" * 99],
      {"sequence_length": 200, "fractions": Fractions(validation=0.0, test=0)},
      "split 'train', 1 of 1 .* 101 tokens, fewer than one row of .* 201",
    ),
    ([], {}, "a.jsonl is an empty file"),
    (["a"], {"sequence_length": 0}, "sequence_length must be at least 1"),
    (["a"], {"tokenizer": "byts"}, "unknown tokenizer 'byts'; did you mean"),
    (["a"], {"tokenizer": "no/such"}, "there is no tokenizer at no/such"),
  ],
)
def test_corpora_that_cannot_be(texts, options, message, tmp_path):
  write_jsonl(tmp_path / "a.jsonl", texts)
  with pytest.raises(ConfigError, match=message):
    build(corpus(tmp_path / "a.jsonl", **options), tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("fractions", "message"),
  [
    ({"validation": 1.0}, r"validation is 1.0; it must be in \[0, 1\)"),
    ({"test": float("nan")}, r"test is nan; it must be in"),
    ({"test": -0.1}, r"test is -0.1; it must be in"),
    (
      {"validation": 0.5, "test": 0.5},
      "validation 0.5 and test 0.5 leave nothing",
    ),
  ],
)
def test_fractions_that_cannot_be(fractions, message):
  with pytest.raises(ConfigError, match=message):
    Fractions(**fractions)


def test_what_is_seen_at_the_start_is_said_before_work(sources, tmp_path):
  (sources / "9.jsonl").write_text("broken\n")
  with pytest.raises(ConfigError, match=r"9.jsonl:1: no JSON"):
    build(corpus(sources), tmp_path / "out")
  assert os.listdir(tmp_path) == ["sources"]


def test_ids_outside_the_vocabulary(sources, tmp_path, monkeypatch):
  class Wrong(ByteTokenizer):
    def encode(self, text):
      return super().encode(text) + 200

  monkeypatch.setitem(TOKENIZERS, "wrong", Wrong)
  with pytest.raises(
    ConfigError, match=r"0.jsonl: document \d+ has token id \d+, outside the"
  ):
    build(corpus(sources, tokenizer="wrong"), tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_files_that_change_meanwhile(sources, tmp_path, monkeypatch):
  class Changing(ByteTokenizer):
    def encode(self, text):
      with open(sources / "2.jsonl", "a") as file:
        file.write("\n")
      return super().encode(text)

  monkeypatch.setitem(TOKENIZERS, "changing", Changing)
  with pytest.raises(ConfigError, match=r"2.jsonl was changed while it was"):
    build(corpus(sources / "2.jsonl", tokenizer="changing"), tmp_path / "out")


def test_counts_of_what_was_not_as_it_should_be(sources, tmp_path):
  with open(sources / "0.jsonl", "ab") as file:
    file.write(b'broken\n{"text": null}\n{"text": "\xff"}\n')
  reading = Reading(bad_records="skip", invalid_utf8="replace")
  manifest, _ = build(corpus(sources, reading=reading), tmp_path / "out")
  assert manifest.skipped == {"broken": 1, "no_text": 1}
  assert manifest.replaced == manifest.sources[0].replaced == 1
  assert manifest.num_documents == 661


def test_the_manifest_names_what_was_read(sources, tmp_path):
  manifest, _ = build(corpus(sources), tmp_path / "out")
  for k, source in enumerate(manifest.sources):
    raw = (sources / f"{k}.jsonl").read_bytes()
    assert source.path == str(sources / f"{k}.jsonl")
    assert source.num_bytes == len(raw)
    assert source.sha256 == hashlib.sha256(raw).hexdigest()
    assert source.num_documents == 110
  assert sum(x.num_tokens for x in manifest.sources) == manifest.num_tokens
  assert manifest.tokenizer["fingerprint"] == "bytes"
  assert manifest.fractions == {"train": 0.7, "validation": 0.1, "test": 0.2}


def test_a_long_document(tmp_path):
  text = "x" * 10**8
  (tmp_path / "a.txt").write_text(text)
  with pytest.raises(ConfigError, match=r"100000000 bytes, more than .*67108"):
    build(corpus(tmp_path / "a.txt"), tmp_path / "out")
  assert os.listdir(tmp_path) == ["a.txt"]


def test_splits_stay_when_documents_come_and_fractions_grow(tmp_path):
  texts = make_texts(300)
  write_jsonl(tmp_path / "a.jsonl", texts)
  write_jsonl(tmp_path / "b.jsonl", make_texts(300, seed=1))
  build(corpus(tmp_path / "a.jsonl"), tmp_path / "one")
  more = Fractions(validation=0.3, test=0.2)
  build(
    corpus(tmp_path / "b.jsonl", tmp_path / "a.jsonl", fractions=more),
    tmp_path / "two",
  )
  for split in ("test", "validation"):
    few, many = (texts_of(tmp_path / name, split) for name in ("one", "two"))
    assert set(few) < set(many)
  counts = collections.Counter(map(split_of, set(texts)))
  assert 0.6 < counts["train"] / counts.total() < 0.8


def test_a_tokenizer_goes_along(tmp_path, sources, small_tokenizer):
  options = {"tokenizer": str(small_tokenizer)}
  build(corpus(sources, **options), tmp_path / "out")
  tokenizer = get_tokenizer(str(small_tokenizer))
  moved = get_tokenizer(str(tmp_path / "out/tokenizer"))
  assert moved.fingerprint == tokenizer.fingerprint
  wanted = [
    text
    for text in dict.fromkeys(read_lines(sources))
    if split_of(text) == "train"
  ]
  assert texts_of(tmp_path / "out", "train", moved) == wanted


def load(directory, tokenizer="bytes", sequence_length=T):
  return load_split(
    str(directory),
    "train",
    data_dir=directory / "nowhere",
    tokenizer=tokenizer,
    sequence_length=sequence_length,
  )


def test_a_run_opens_it_as_it_is(sources, tmp_path, small_tokenizer):
  out = tmp_path / "out"
  manifest, _ = build(corpus(sources), out)
  assert load(out).info == manifest.splits["train"]
  assert not (out / "nowhere").exists()
  with pytest.raises(
    ConfigError, match="for a sequence_length of 16; that of the run is 17"
  ):
    load(out, sequence_length=T + 1)
  other = get_tokenizer(str(small_tokenizer))
  with pytest.raises(
    ConfigError,
    match=f"fingerprint 'bytes'; that of the run has {other.fingerprint!r}",
  ):
    load(out, tokenizer=str(small_tokenizer))


def test_an_older_version_is_refused(sources, tmp_path, monkeypatch):
  monkeypatch.setattr("deltajax.data.packed_dataset.PACK_VERSION", "1.0.0")
  build(corpus(sources), tmp_path / "out")
  monkeypatch.undo()
  with pytest.raises(ConfigError, match=r"packed in version 1.0.0; this is"):
    load(tmp_path / "out")


def test_manifests_that_are_none(tmp_path):
  with pytest.raises(ConfigError, match=r"has no manifest.json"):
    read_manifest(tmp_path)
  (tmp_path / "manifest.json").write_text("{}")
  with pytest.raises(ConfigError, match=r"manifest.json is no manifest"):
    read_manifest(tmp_path)
