"""The order of a run depends on its seed, and on nothing else."""

import concurrent.futures
import itertools
import json
import subprocess
import sys
import threading
import time

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from deltajax.config import DataConfig
from deltajax.data import pipeline, storage
from deltajax.data.packing import PackedSequences, target_mask
from deltajax.data.pipeline import Mixture
from deltajax.data.python_stdlib import PythonStdlib
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.routing.validation import ConfigError
from tests.helpers import build_corpus, ROOT

TOKENIZER = ByteTokenizer()
T = 4


def make_source(num_rows, first=0):
  """Rows of T+1 tokens, each recognisable by its tokens."""
  size = num_rows * (T + 1) - 2
  ids = np.arange(first, first + size)
  # Two digits in base 200 at every place, so that rows are distinct.
  ids = np.where(ids % 2, ids % 200, ids // 200)
  return PackedSequences.pack([ids], tokenizer=TOKENIZER, sequence_length=T)


def row_numbers(source, batches):
  """Which rows of the source the batches hold, in order."""
  numbers = {row["tokens"].tobytes(): k for k, row in enumerate(source)}
  assert len(numbers) == len(source)
  rows = itertools.chain.from_iterable(batch["tokens"] for batch in batches)
  return [numbers[row.tobytes()] for row in rows]


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def assert_same(first, second):
  assert len(first) == len(second)
  for a, b in zip(first, second, strict=True):
    assert set(a) == set(b) == {"tokens", "segment_ids", "positions"}
    for name in a:
      np.testing.assert_array_equal(a[name], b[name])


SOURCE = make_source(23)


def alone(source=SOURCE):
  return Mixture.create([source])


def iterate(source=SOURCE, **options):
  return pipeline.train_iterator(alone(source), **{"batch_size": 5, **options})


def test_batches_are_int32_of_one_shape():
  for batch in take(iterate(seed=0), 12):
    for values in batch.values():
      assert values.shape == (5, T + 1)
      assert values.dtype == np.int32


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_every_epoch_holds_every_row_once(num_rows, batch_size, seed):
  batch_size = min(batch_size, num_rows)
  source = make_source(num_rows)
  iterator = iterate(source, batch_size=batch_size, seed=seed)
  # As many rows as three whole epochs: batches may span epochs.
  order = row_numbers(source, take(iterator, -(-3 * num_rows // batch_size)))
  for epoch in range(3):
    rows = order[epoch * num_rows : (epoch + 1) * num_rows]
    assert sorted(rows) == list(range(num_rows))


def test_epochs_differ_and_the_shuffle_reaches_across_the_set():
  source = make_source(200)
  order = row_numbers(source, take(iterate(source, seed=0, batch_size=50), 8))
  first, second = order[:200], order[200:]
  assert first != second
  assert first != sorted(first)
  # No window: on average a shuffled row moves by a third of the set.
  distances = [abs(k - row) for k, row in enumerate(first)]
  assert 50 < np.mean(distances) < 85


def test_seed_decides_the_order():
  orders = [row_numbers(SOURCE, take(iterate(seed=s), 5)) for s in (3, 3, 4)]
  assert orders[0] == orders[1] != orders[2]
  # A golden order: a new grain that shuffles otherwise breaks every resume.
  assert orders[0][:10] == [4, 22, 16, 7, 21, 3, 18, 19, 20, 0]
  # Epochs of one seed are not those of the next seed, one epoch later.
  later = row_numbers(SOURCE, take(iterate(seed=3, batch_size=23), 2))[23:]
  assert later != row_numbers(SOURCE, take(iterate(seed=4, batch_size=23), 1))


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_resume_equals_the_undisturbed_run(done):
  # 23 rows are 4.6 batches: 4 is about to span epochs, 7 is mid-epoch.
  undisturbed = take(iterate(seed=1), 12)
  stopped = iterate(seed=1, num_threads=2)
  assert_same(take(stopped, done), undisturbed[:done])
  state = json.loads(json.dumps(stopped.get_state()))
  for num_threads in (0, 1, 3):
    resumed = iterate(make_source(23), seed=1, num_threads=num_threads)
    take(resumed, 2)  # Must not matter.
    resumed.set_state(state)
    assert_same(take(resumed, 12 - done), undisturbed[done:])


@pytest.mark.parametrize("rows", [[0, 1, 2], [5], [1, 4], [4, 0, 3, 2]])
def test_a_host_reads_its_rows_of_the_batch(rows):
  whole = take(iterate(seed=1, batch_size=6), 9)
  own = take(iterate(seed=1, batch_size=6, rows=np.array(rows)), 9)
  assert_same(own, [{k: x[rows] for k, x in batch.items()} for batch in whole])


def on_hosts(mixture, num_hosts, count, *, state=None, **options):
  """Whole batches, of which each host reads its part; and their state."""
  options = {"batch_size": 8, "seed": 5, **options}
  iterators = [
    pipeline.train_iterator(mixture, rows=rows, **options)
    for rows in np.split(np.arange(options["batch_size"]), num_hosts)
  ]
  if state is not None:
    for iterator in iterators:
      iterator.set_state(state)
  parts = [take(iterator, count) for iterator in iterators]
  states = [iterator.get_state() for iterator in iterators]
  assert all(x == states[0] for x in states)
  return [joined(x) for x in zip(*parts, strict=True)], states[0]


def joined(batches):
  """A batch of what each host has of it."""
  return {
    name: np.concatenate([x[name] for x in batches]) for name in batches[0]
  }


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_order_is_that_of_all_hosts_together(num_hosts, num_threads):
  """The same global batches, in which each epoch has each row once."""
  source = make_source(24)
  threads = {"num_threads": num_threads}
  for mixture in (alone(source), make_mixture()):
    found, state = on_hosts(mixture, num_hosts, 9, **threads)
    options = {"batch_size": 8, "seed": 5}
    assert_same(found, take(pipeline.train_iterator(mixture, **options), 9))
    # Half of the way, another number of hosts goes on.
    first, state = on_hosts(mixture, num_hosts, 4, **threads)
    rest, _ = on_hosts(mixture, 4 // num_hosts, 5, state=state, num_threads=2)
    assert_same(first + rest, found)
  found, _ = on_hosts(alone(source), num_hosts, 6, **threads)
  one, two = row_numbers(source, found[:3]), row_numbers(source, found[3:])
  assert sorted(one) == sorted(two) == list(range(24))
  assert one != two


# Goes on as so many hosts, in a process that knows the state alone.
FRESH = """
import json, sys
import numpy as np
from deltajax.config import DataConfig
from deltajax.data import pipeline
from tests.data.test_pipeline import on_hosts
data, num_hosts, count, state, out = json.loads(sys.argv[1])
mixture = pipeline.load_mixture(DataConfig(**data), "train")
batches, _ = on_hosts(mixture, num_hosts, count, state=state)
np.save(out, np.stack([x["tokens"] for x in batches]))
"""


def test_another_number_of_hosts_goes_on_in_a_fresh_process(small, tmp_path):
  path, _ = small
  data = {
    "dataset": str(path),
    "data_dir": str(tmp_path),
    "sequence_length": 8,
  }
  mixture = pipeline.load_mixture(DataConfig(**data), "train")
  epoch = len(mixture) // 8
  whole, _ = on_hosts(mixture, 1, epoch // 2 + epoch)
  first, state = on_hosts(mixture, 2, epoch // 2, num_threads=3)
  assert_same(first, whole[: epoch // 2])
  out = tmp_path / "rest.npy"  # Into the second epoch.
  subprocess.run(
    [
      *(sys.executable, "-c", FRESH),
      json.dumps([data, 4, epoch, state, str(out)]),
    ],
    cwd=ROOT,
    check=True,
  )
  np.testing.assert_array_equal(
    np.load(out), np.stack([x["tokens"] for x in whole[epoch // 2 :]])
  )


class Recording:
  """A source that writes down what is read of it."""

  def __init__(self, source):
    self.source, self.read = source, []

  def __len__(self):
    return len(self.source)

  def __getitem__(self, k):
    self.read.append(int(k))
    return self.source[k]


def test_a_host_reads_no_other_rows():
  source = Recording(SOURCE)
  options = {"seed": 1, "batch_size": 6, "num_threads": 0}
  take(iterate(source, rows=[1, 4], **options), 3)
  read = list(source.read)
  assert 6 <= len(read) < 20  # Some ahead of the need.
  whole = np.reshape(
    row_numbers(SOURCE, take(iterate(seed=1, batch_size=6), len(read) // 2)),
    (-1, 6),
  )
  assert read == whole[:, [1, 4]].ravel().tolist()


def test_state_does_not_depend_on_the_rows():
  two = iterate(seed=1, batch_size=6, rows=[3, 4])
  take(two, 5)
  one = iterate(seed=1, batch_size=6)
  one.set_state(two.get_state())
  assert_same(take(one, 3), take(iterate(seed=1, batch_size=6), 8)[5:])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_size": 24}, "batch_size 24 is larger .* 23 rows"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"rows": [0, 5]}, r"rows \[0, 5\] must be some of 0 to 4"),
    ({"rows": [-1]}, r"rows \[-1\] must be some of 0 to 4"),
    ({"rows": []}, r"rows \[\] must be some of 0 to 4"),
    ({"seed": -1}, "seed must be from 0 to .*, got -1"),
    ({"num_threads": -1}, "num_threads must be at least 0, got -1"),
  ],
)
def test_options_that_cannot_work_raise(options, message):
  with pytest.raises(ConfigError, match=message):
    iterate(**{"seed": 0, **options})


def make_mixture(weights=(0.6, 0.3, 0.1)):
  """Three data sets of 23, 40 and 7 rows, and which a row is of."""
  sizes = (23, 40, 7)
  sources = [make_source(size, 1000 * i) for i, size in enumerate(sizes)]
  return Mixture.create(sources, weights)


def numbers_in(mixture, batches):
  """The data set and row of all rows of the batches, in order."""
  found = {
    row["tokens"].tobytes(): (i, k)
    for i, source in enumerate(mixture.sources)
    for k, row in enumerate(source)
  }
  assert len(found) == len(mixture)
  rows = itertools.chain.from_iterable(batch["tokens"] for batch in batches)
  return [found[row.tobytes()] for row in rows]


def test_a_mixture_has_its_shares_from_the_beginning():
  mixture = make_mixture()
  batches = take(pipeline.train_iterator(mixture, batch_size=5, seed=3), 80)
  order = numbers_in(mixture, batches)
  for i, weight in enumerate(mixture.weights):
    count = np.cumsum([j == i for j, _ in order])
    share = weight * (1 + np.arange(len(order)))
    assert np.abs(count - share).max() <= 2
    # Each data set has epochs of its own, and another order in each.
    rows = [k for j, k in order if j == i]
    size = len(mixture.sources[i])
    epochs = [rows[b : b + size] for b in range(0, len(rows) - size, size)]
    assert epochs
    for epoch in epochs:
      assert sorted(epoch) == list(range(size))
    assert len(epochs) < 2 or epochs[0] != epochs[1]


def test_a_mixture_is_the_same_for_all_hosts_and_resumes():
  mixture = make_mixture()

  def batches(count, **options):
    options = {"batch_size": 4, "seed": 1, **options}
    return take(pipeline.train_iterator(mixture, **options), count)

  whole = batches(30)
  for threads in (0, 1, 3):
    parts = [
      batches(30, rows=rows, num_threads=threads) for rows in ([0, 1], [2], [3])
    ]
    assert_same([joined(x) for x in zip(*parts, strict=True)], whole)
  first = pipeline.train_iterator(mixture, batch_size=4, seed=1)
  take(first, 17)
  second = pipeline.train_iterator(mixture, batch_size=4, seed=1, num_threads=0)
  second.set_state(json.loads(json.dumps(first.get_state())))
  assert_same(take(second, 13), whole[17:])
  assert numbers_in(mixture, whole) != numbers_in(mixture, batches(30, seed=2))


def test_without_weights_every_row_counts_the_same():
  mixture = make_mixture(())
  assert mixture.weights == (23 / 70, 40 / 70, 7 / 70)
  assert mixture.info.num_tokens == sum(
    source.info.num_tokens for source in mixture.sources
  )


def test_a_mixture_is_known_by_its_parts_and_weights():
  one, other = make_mixture(), make_mixture((0.5, 0.4, 0.1))
  prints = {
    *(source.info.fingerprint for source in one.sources),
    *(one.info.fingerprint, other.info.fingerprint),
  }
  assert len(prints) == 5
  assert make_mixture().info.fingerprint == one.info.fingerprint
  assert alone().info == SOURCE.info


def test_validation_of_a_mixture_has_a_part_of_each():
  mixture = make_mixture((0.5, 0.48, 0.02))
  batches = pipeline.validation_batches(mixture, batch_size=4, num_rows=20)
  counts = [i for i, _ in numbers_in(mixture, batches)]
  assert counts == [0] * 10 + [1] * 9 + [2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.integers(1, 9))
def test_validation_has_as_many_rows_as_asked_and_of_each_its_share(
  parts, more
):
  weights = [part / sum(parts) for part in parts]
  source, num_rows = make_source(50), len(parts) + more
  mixture = Mixture.create([source] * len(parts), weights)
  counts = mixture.chosen(num_rows)
  assert sum(counts) == num_rows
  assert min(counts) >= 1
  for count, weight in zip(counts, weights, strict=True):
    assert count < max(weight * num_rows, 1) + 1


@pytest.mark.parametrize("weights", [(), (0.5, 0.4, 0.1)])
def test_all_rows_of_a_mixture_are_all_whatever_it_weighs(weights):
  mixture = make_mixture(weights)
  batches = pipeline.validation_batches(mixture, batch_size=7, num_rows=None)
  assert len(set(numbers_in(mixture, batches))) == len(mixture) == 70
  assert mixture.chosen(None) == (23, 40, 7)
  # A data set that is used up gives what it has.
  assert mixture.chosen(10**6) == (23, 40, 7)


def test_fewer_rows_than_data_sets_are_refused():
  with pytest.raises(ConfigError, match="num_rows is 2; 3 data sets are read"):
    make_mixture().chosen(2)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"weights": (0.5, 0.6)}, r"sum to 1\.1; they must be positive and sum"),
    ({"weights": (1.5, -0.5)}, "must be positive"),
    ({"weights": (1.0,)}, "has 1 numbers; .* name 2 data sets"),
  ],
)
def test_weights_that_do_not_fit(options, message):
  with pytest.raises(ConfigError, match=message):
    DataConfig(mixture=("a/b",), **options)


def test_validation_never_moves_and_repeats_no_row():
  first = pipeline.validation_batches(alone(), batch_size=4, num_rows=12)
  again = pipeline.validation_batches(
    alone(make_source(23)), batch_size=4, num_rows=12
  )
  assert_same(first, again)
  order = row_numbers(SOURCE, first)
  assert len(set(order)) == 12
  assert order != list(range(12))
  # A golden order: it must be the same for every version of everything.
  assert order == [11, 10, 21, 14, 20, 1, 13, 22, 16, 8, 6, 17]
  other = pipeline.validation_batches(alone(), batch_size=5, num_rows=12)
  other[-1] = {name: x[:2] for name, x in other[-1].items()}
  assert row_numbers(SOURCE, other) == order


def test_validation_pads_its_last_batch():
  batches = pipeline.validation_batches(alone(), batch_size=5, num_rows=99)
  assert len(batches) == 5
  for batch in batches:
    for values in batch.values():
      assert values.shape == (5, T + 1)
      assert values.dtype == np.int32
  last = batches[-1]
  assert not last["segment_ids"][3:].any()
  assert last["segment_ids"][:3].all()
  assert (last["tokens"][3:] == TOKENIZER.pad_id).all()
  assert not target_mask(last["segment_ids"])[3:].any()
  batches[-1] = {name: values[:3] for name, values in last.items()}
  assert sorted(row_numbers(SOURCE, batches)) == list(range(23))


def test_validation_sizes_must_be_positive():
  with pytest.raises(ConfigError, match="num_rows must be at least 1"):
    pipeline.validation_batches(alone(), batch_size=1, num_rows=0)


def load(dataset, split, data_dir, sequence_length=T):
  return pipeline.load_split(
    dataset,
    split,
    data_dir=data_dir,
    tokenizer="bytes",
    sequence_length=sequence_length,
  )


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """A data set of 100 small files, and the texts of its files."""
  root = tmp_path_factory.mktemp("root")
  texts = {f"x = {i}  # é\n" for i in range(100)}
  for i, text in enumerate(sorted(texts)):
    (root / f"m{i}.py").write_text(text)
  return build_corpus(root, tmp_path_factory.mktemp("data")), texts


def test_load_split_reads_a_directory(small, tmp_path):
  path, texts = small
  seen = []
  for split in ("train", "validation", "test"):
    source = load(str(path), split, tmp_path)
    assert source.info.sequence_length == T
    tokens = np.concatenate([row["tokens"] for row in source])
    for piece in np.split(tokens, np.flatnonzero(tokens == TOKENIZER.bos_id)):
      seen.append(TOKENIZER.decode(piece))
  assert sorted(filter(None, seen)) == sorted(texts)


def test_load_split_builds_a_named_data_set(small, tmp_path, monkeypatch):
  path, texts = small
  calls = []

  def build_dataset(builder_class, data_dir):
    calls.append((builder_class, data_dir))
    return path

  monkeypatch.setattr(storage, "build_dataset", build_dataset)
  source = load("python_stdlib", "train", tmp_path)
  assert calls == [(PythonStdlib, tmp_path)]
  assert 50 < source.info.num_documents < len(texts)


def test_load_split_errors(small, tmp_path):
  path, _ = small
  with pytest.raises(ConfigError, match="did you mean 'python_stdlib'"):
    load("python_stdlb", "train", tmp_path)
  with pytest.raises(ConfigError, match="did you mean 'train'"):
    load(str(path), "trian", tmp_path)
  with pytest.raises(
    ConfigError, match=r"tokens, fewer than one row .* 100001"
  ):
    load(str(path), "train", tmp_path, sequence_length=100_000)
  with pytest.raises(ConfigError, match=r"there is no .*nothing"):
    load(str(tmp_path / "nothing"), "train", tmp_path)


def write_texts(root, kind):
  """200 documents in files of this kind, and what they say."""
  root.mkdir(parents=True, exist_ok=True)
  texts = [f"document {i}, no more\n" for i in range(200)]
  if kind == "text":
    for i, text in enumerate(texts):
      (root / f"{i:03}.txt").write_text(text)
    return root, texts
  file = root / "all.jsonl"
  lines = [json.dumps({"text": text}) + "\n" for text in texts]
  file.write_text("".join(lines))
  return file, texts


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_texts_are_prepared_once(kind, tmp_path):
  path, texts = write_texts(tmp_path / "texts", kind)
  data_dir = tmp_path / "data"
  splits = {
    split: load(str(path), split, data_dir) for split in ("train", "validation")
  }
  tokens = np.concatenate(
    [row["tokens"] for source in splits.values() for row in source]
  )
  pieces = np.split(tokens, np.flatnonzero(tokens == TOKENIZER.bos_id))
  found = [TOKENIZER.decode(piece) for piece in pieces]
  assert sorted(filter(None, found)) == sorted(texts)
  assert 0 < splits["validation"].info.num_documents < 40
  prepared = list((data_dir / "prepared").iterdir())
  assert len(prepared) == 1
  before = prepared[0].stat().st_mtime_ns
  assert load(str(path), "train", data_dir).info == splits["train"].info
  assert prepared[0].stat().st_mtime_ns == before
  # Other texts in the same place are another data set.
  file = path if path.is_file() else path / "000.txt"
  text = file.read_text().replace("document 0", "document zero")
  file.write_text(text)
  assert load(str(path), "train", data_dir).info != splits["train"].info


def test_who_comes_second_waits_and_reads_what_the_first_prepared(
  tmp_path, monkeypatch, capsys
):
  path, _ = write_texts(tmp_path / "texts", "jsonl")
  begun, goes_on, made = threading.Event(), threading.Event(), []
  prepare = pipeline.prepare

  def slow(*args, **kwargs):
    begun.set()
    assert goes_on.wait(60)
    made.append(prepare(*args, **kwargs))

  monkeypatch.setattr(pipeline, "prepare", slow)
  with concurrent.futures.ThreadPoolExecutor() as threads:
    first = threads.submit(load, str(path), "train", tmp_path / "data")
    assert begun.wait(60)
    second = threads.submit(load, str(path), "train", tmp_path / "data")
    said, end = "", time.monotonic() + 30
    while "waiting: another process prepares" not in said:
      assert time.monotonic() < end
      assert not second.done()
      time.sleep(0.01)
      said += capsys.readouterr().out
    goes_on.set()
    assert first.result().info == second.result().info
  assert len(made) == 1
  assert len(list((tmp_path / "data/prepared").iterdir())) == 1


def test_texts_too_few_for_a_validation_set_are_refused(tmp_path):
  (tmp_path / "one.txt").write_text("only one\n" * 100)
  with pytest.raises(ConfigError, match="validation"):
    load(str(tmp_path / "one.txt"), "train", tmp_path / "data")
  assert not list((tmp_path / "data").rglob("*.json"))
