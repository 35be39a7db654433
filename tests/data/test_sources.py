"""Every kind of source gives its documents, or one clear message."""

import gc
import gzip
import json

import numpy as np
import pytest

from deltajax.data import records, sources, storage
from deltajax.data.packed_dataset import write_packed
from deltajax.data.records import Reading, Tally
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.routing.validation import ConfigError
from tests.helpers import build_corpus

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = ["first\nof two lines", "", "zweiter é €", "日本 " * 300]


def write_parquet(path, values, kind=None, column="text"):
  """With the columns of FineWeb-Edu around the text."""
  n = len(values)
  table = pa.table(
    {
      column: pa.array(values, kind or pa.string()),
      "id": [f"<urn:uuid:{k}>" for k in range(n)],
      "dump": ["CC-MAIN-2024-10"] * n,
      "url": ["https://example.org"] * n,
      "language_score": [0.9] * n,
      "token_count": list(range(n)),
      "score": [3.0] * n,
      "int_score": [3] * n,
    }
  )
  pq.write_table(table, path, row_group_size=3)


def lines_of(texts, column="text"):
  return b"".join(
    json.dumps({"id": 1, column: text}, ensure_ascii=k % 2 == 0).encode()
    + b"\n"
    for k, text in enumerate(texts)
  )


def zstd(raw):
  half = len(raw) // 2  # Two frames, as appended files have.
  return b"".join(
    pa.compress(x, codec="zstd", asbytes=True) for x in (raw[:half], raw[half:])
  )


def write_source(kind, path, texts):
  if kind == "parquet":
    write_parquet(path / "a.parquet", texts)
  elif kind == "jsonl":
    (path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of(texts) + b"\n \n")
  elif kind == "jsonl.gz":
    (path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(texts)))
  elif kind == "jsonl.zst":
    (path / "a.jsonl.zst").write_bytes(zstd(lines_of(texts)))
  elif kind == "text":
    for k, text in enumerate(texts):
      (path / f"{k}.txt").write_text(text)


def read(*paths, tally=None, reading=None, **options):
  reading, tally = reading or Reading(), tally or Tally()
  found = []
  for part in sources.find_parts([str(path) for path in paths], **options):
    sources.check_part(part, reading)
    found += sources.read_documents(part, reading, tally)
  return found


@pytest.mark.parametrize(
  "kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "text"]
)
def test_every_kind(kind, tmp_path):
  write_source(kind, tmp_path, TEXTS)
  (tmp_path / ".hidden").write_text("not of the corpus")
  assert read(tmp_path) == TEXTS
  assert read(*sorted(tmp_path.glob("[!.]*"))) == TEXTS


@pytest.mark.parametrize(
  "kind",
  [
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    pa.dictionary(pa.int32(), pa.string()),
  ],
  ids=str,
)
def test_types_of_parquet_columns(kind, tmp_path):
  values = TEXTS
  if "binary" in str(kind):
    values = [text.encode() for text in TEXTS]
  write_parquet(tmp_path / "a.parquet", values, kind, column="content")
  reading = Reading(column="content")
  assert read(tmp_path / "a.parquet", reading=reading) == TEXTS


def test_a_tfds_set(tmp_path):
  root = tmp_path / "root"
  root.mkdir()
  for i in range(100):
    (root / f"m{i}.py").write_text(f"x = {i}  # é\n")
  path = build_corpus(root, tmp_path / "d")
  splits = sorted(storage.split_names(path))
  wanted = [t for split in splits for t in storage.read_texts(path, split)]
  assert len(wanted) == 100
  assert read(path) == wanted
  assert len(sources.find_parts([str(path)])) == len(splits)
  train = list(storage.read_texts(path, "train"))
  assert read(path, pattern="*-train.*") == train
  with pytest.raises(ConfigError, match="unknown feature 'txt'; did you mean"):
    read(path, reading=Reading(column="txt"))


def test_a_tfds_set_of_several_files_is_read_file_by_file(
  tmp_path, monkeypatch
):
  monkeypatch.setattr("deltajax.data.packing.TOKENS_PER_SHARD", 20)
  documents = [np.arange(30), np.arange(25)]
  write_packed(
    tmp_path,
    {"train": documents},
    tokenizer=ByteTokenizer(),
    sequence_length=4,
  )
  parts = sources.find_parts([str(tmp_path)])
  # 59 tokens, 5 in a row, 4 rows in a file.
  assert [(p.begin, p.end) for p in parts] == [(0, 4), (4, 8), (8, 12)]
  found = []
  for part in parts:
    reading = Reading(column="tokens", bad_records="skip")
    tally = Tally()
    assert not list(sources.read_documents(part, reading, tally))
    found.append(tally.skipped)
  assert found == [{"no_text": 4}] * 3  # Numbers, no text.
  with pytest.raises(ConfigError, match="unknown feature 'text'"):
    read(tmp_path)


def test_order_is_that_of_the_sources_and_of_paths(tmp_path):
  names = ("b.txt", "a/z.txt", "a/b/y.txt", "c.txt")
  for name in names:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  assert read(tmp_path) == ["a/b/y.txt", "a/z.txt", "b.txt", "c.txt"]
  assert read(tmp_path / "c.txt", tmp_path / "a") == [
    *("c.txt", "a/b/y.txt", "a/z.txt"),
  ]


def test_small_files_are_read_together(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "_FILES_AT_ONCE", 4)
  for k in range(10):
    (tmp_path / f"{k}.txt").write_text(str(k))
  parts = sources.find_parts([str(tmp_path)])
  assert [len(part.paths) for part in parts] == [4, 4, 2]
  assert read(tmp_path) == [str(k) for k in range(10)]
  digests = {part.sha256() for part in parts}
  (tmp_path / "0.txt").write_text("1")
  (tmp_path / "1.txt").write_text("0")
  assert len(digests | {part.sha256() for part in parts}) == 4


def test_kind_and_pattern_choose(tmp_path):
  write_parquet(tmp_path / "a.parquet", ["a"])
  (tmp_path / "b.txt").write_text("b")
  (tmp_path / "c.rst").write_text("c")
  assert read(tmp_path, pattern="*.parquet") == ["a"]
  assert read(tmp_path, pattern="*.[rt][sx]t", kind="text") == ["b", "c"]
  assert read(tmp_path / "c.rst", kind="text") == ["c"]


@pytest.mark.parametrize(
  ("names", "options", "message"),
  [
    (["no/such"], {}, "'no/such' does not exist"),
    ([], {}, "no source is given"),
    (["."], {}, "several kinds: parquet, text; choose with a pattern"),
    (["b.txt", "."], {"kind": "text"}, "b.txt is in two sources"),
    (["c.csv"], {}, r"c.csv is of no known type: .parquet, .jsonl, "),
    (["."], {"pattern": "*.c*"}, r"c.csv is of no known type"),
    (["."], {"pattern": "*.rst"}, r"holds no file like '\*.rst'"),
    (["empty.parquet"], {}, "empty.parquet is an empty file"),
    (["b.txt"], {"kind": "parquet"}, "b.txt cannot be read as parquet"),
    (["b.txt"], {"kind": "tfds"}, "a TFDS set is named by directory"),
    (["."], {"kind": "tfds"}, "is not a TFDS directory"),
    (["."], {"kind": "parket"}, "unknown kind 'parket'; did you mean"),
  ],
)
def test_sources_that_cannot_be(names, options, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_parquet(tmp_path / "a.parquet", ["a"])
  (tmp_path / "b.txt").write_text("b")
  if options.get("pattern") or "c.csv" in names:
    (tmp_path / "c.csv").write_text("c")
  if "empty.parquet" in names:
    (tmp_path / "empty.parquet").write_text("")
  with pytest.raises(ConfigError, match=message):
    read(*names, **options)


def test_a_missing_column_names_those_there(tmp_path):
  write_parquet(tmp_path / "a.parquet", ["a"], column="txt")
  with pytest.raises(
    ConfigError,
    match=r"a.parquet: unknown column 'text'; did you mean 'txt'\?"
    r" Valid: dump, id, .*url",
  ):
    read(tmp_path / "a.parquet")
  reading = Reading(column="score")
  with pytest.raises(ConfigError, match="column 'score' holds double, not"):
    read(tmp_path / "a.parquet", reading=reading)


GOOD = b'{"text": "good"}\n'
BAD_LINES = {
  b'{"text": "go': ("broken", "no JSON: "),
  b"[1, 2]": ("broken", "no JSON object"),
  b"[" * 9999: ("broken", "no JSON"),
  b'{"txt": "a"}': ("no_text", "unknown column 'text'; did you mean 'txt'"),
  b'{"text": null}': ("no_text", "'text' is null, no string"),
  b'{"text": 5}': ("no_text", "'text' is 5, no string"),
  b'{"text": "' + 50 * b"long " + b'"}': (
    *("too_long", "the line has more than max_document_bytes 100"),
  ),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda x: x[:14])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_bad_lines(line, end, tmp_path):
  reason, message = BAD_LINES[line]
  limit = 20_000 if line.startswith(b"[[") else 100
  path = tmp_path / "a.jsonl"
  path.write_bytes(GOOD + b"\n" + line + end + (GOOD if end else b""))
  with pytest.raises(ConfigError, match=rf"a.jsonl:3: {message}"):
    read(path, reading=Reading(max_document_bytes=limit))
  tally = Tally()
  reading = Reading(max_document_bytes=limit, bad_records="skip")
  found = read(path, reading=reading, tally=tally)
  assert found == ["good"] * (2 if end else 1)
  assert tally == Tally(0, {reason: 1})


def test_large_rows_are_read_a_few_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(records, "_BYTES_AT_ONCE", 2**18)
  rng = np.random.default_rng(0)
  texts = [rng.bytes(2**16).hex() for _ in range(64)]
  pq.write_table(  # Pages of a row; one group, as large as memory.
    pa.table({"id": range(64), "text": texts}),
    tmp_path / "a.parquet",
    write_batch_size=1,
    use_dictionary=False,
  )
  before = pa.default_memory_pool()
  pool = pa.proxy_memory_pool(before)
  pa.set_memory_pool(pool)
  try:
    assert read(tmp_path / "a.parquet") == texts
    gc.collect()
  finally:
    pa.set_memory_pool(before)
  assert pool.max_memory() < 2**21 < sum(map(len, texts)) / 3


def test_null_and_long_rows(tmp_path):
  write_parquet(tmp_path / "a.parquet", ["a", None, "b" * 101, "c"])
  path = tmp_path / "a.parquet"
  with pytest.raises(ConfigError, match=r"a.parquet, row 2: 'text' is null"):
    read(path)
  tally = Tally()
  reading = Reading(max_document_bytes=100, bad_records="skip")
  assert read(path, reading=reading, tally=tally) == ["a", "c"]
  assert tally == Tally(0, {"no_text": 1, "too_long": 1})


def test_long_files(tmp_path):
  (tmp_path / "a.txt").write_text("b" * 101)
  with pytest.raises(
    ConfigError, match=r"a.txt: the file has 101 bytes, more than .* 100"
  ):
    read(tmp_path, reading=Reading(max_document_bytes=100))
  reading = Reading(max_document_bytes=101)
  assert read(tmp_path, reading=reading) == ["b" * 101]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_bytes_that_are_not_utf8(kind, tmp_path):
  raw = b"caf\xe9 au lait"
  if kind == "parquet":
    # Written as bytes, called a string: nothing checks.
    array = pa.array([b"good", raw], pa.binary())
    array = pa.StringArray.from_buffers(2, *array.buffers()[1:])
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    where = "a.parquet, row 2: not UTF-8, byte 0xe9 at 3"
  elif kind == "jsonl":
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "' + raw + b'"}\n')
    where = "a.jsonl:2: not UTF-8, byte 0xe9 at 13"
  else:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(raw)
    where = "b.txt: not UTF-8, byte 0xe9 at 3"
  with pytest.raises(ConfigError, match=where):
    read(tmp_path)
  tally = Tally()
  found = read(tmp_path, reading=Reading(invalid_utf8="replace"), tally=tally)
  assert found == ["good", "caf\ufffd au lait"]
  assert tally == Tally(replaced=1)


def test_halves_of_characters_are_not_utf8(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "a\\ud83db"}\n')
  with pytest.raises(ConfigError, match=r"a.jsonl:2: not UTF-8"):
    read(path)
  tally = Tally()
  found = read(path, reading=Reading(invalid_utf8="replace"), tally=tally)
  assert found[0] == "😀"
  assert found[1].encode().decode() == found[1]  # Can be written now.
  assert tally.replaced == 1


def test_a_document_is_counted_once_however_often_it_is_replaced(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(
    b'{"text": "\xff a\\ud83db"}\n{"text": 7, "x": "\xff"}\n{"text": "b"}\n'
  )
  tally = Tally()
  reading = Reading(invalid_utf8="replace", bad_records="skip")
  assert len(read(path, reading=reading, tally=tally)) == 2
  assert tally == Tally(replaced=1, skipped={"no_text": 1})


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("fault", ["cut", "flipped"])
def test_damaged_files(kind, fault, tmp_path):
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 9, 900).tobytes().hex() for _ in range(100)]
  write_source(kind, tmp_path, texts)
  (path,) = tmp_path.iterdir()
  raw = bytearray(path.read_bytes())
  if fault == "cut":
    raw = raw[: len(raw) // 2]
  else:
    raw[len(raw) // 3 : len(raw) // 3 + 9] = b"\xff" * 9
  path.write_bytes(raw)
  with pytest.raises(ConfigError, match=r"a\.\S+ cannot be read"):
    assert read(path) != texts


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"invalid_utf8": "ignore"}, "unknown invalid_utf8 'ignore'.* replace, st"),
    ({"bad_records": "skipp"}, "did you mean 'skip'"),
    ({"max_document_bytes": 0}, "max_document_bytes is 0; it must be positive"),
  ],
)
def test_readings_that_cannot_be(options, message):
  with pytest.raises(ConfigError, match=message):
    Reading(**options)
