"""The command as a user runs it: in processes, killed, resumed, trained on."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from deltajax.data.prepare import Corpus, prepare
from tests.helpers import ROOT, run_module
from tests.train.test_pretrain import TINY
from train.prepare_data import command

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MODULE = "train.prepare_data"
run = functools.partial(run_module, MODULE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
  """Four parquet files in FineWeb-Edu's schema."""
  directory = tmp_path_factory.mktemp("sources")
  for k in range(4):
    texts = [f"value_{i} = {k} * {i}\n" * (i % 50) for i in range(400)]
    table = pa.table({"text": texts, "id": list(map(str, range(400)))})
    pq.write_table(table, directory / f"{k}.parquet")
  return directory


def options(sources, out, *more):
  return [
    *("build", str(out), "--sources", str(sources), "--tokenizer", "bytes"),
    *("--sequence-length", "32", "--validation", "0.2", "--test", "0", *more),
  ]


def content(directory):
  files = [path for path in directory.rglob("*") if path.is_file()]
  return {path.relative_to(directory): path.read_bytes() for path in files}


def wait_for(condition):
  for _ in range(3000):
    if condition():
      return
    time.sleep(0.02)
  raise TimeoutError


@pytest.fixture(scope="module")
def prepared(sources, tmp_path_factory):
  """What one process makes."""
  out = tmp_path_factory.mktemp("prepared") / "out"
  done = run(*options(sources, out, "--workers", "0"))
  assert done.returncode == 0, done.stderr
  return out, done.stdout


def test_killed_and_resumed_by_other_numbers_of_processes(
  sources, prepared, tmp_path
):
  out = tmp_path / "out"
  partial = tmp_path / "out.partial"
  process = subprocess.Popen(
    [sys.executable, "-m", MODULE, *options(sources, out, "--workers", "3")],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
  )
  wait_for(lambda: any(partial.glob("parts/[!.]*")))
  tasks = pathlib.Path(f"/proc/{process.pid}/task")
  children = [
    int(pid)
    for file in tasks.glob("*/children")
    for pid in file.read_text().split()
  ]
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not out.exists()

  def gone(pid):
    status = pathlib.Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z" in status.read_text()

  wait_for(lambda: all(map(gone, children)))  # Processes end with the first.
  done = run(*options(sources, out, "--workers", "2"))
  assert done.returncode == 0, done.stderr
  assert content(out) == content(prepared[0])
  assert os.listdir(tmp_path) == ["out"]


def test_says_what_it_did(prepared):
  out, printed = prepared
  for pattern in (
    r"sources    4 parts, 0\.\d MB",
    r"encoded    4 of 4 parts  1,600 documents  0.\dM tokens"
    r"  [\d,]+ documents/s  [\d,]+ tokens/s",
    r"packed     2 of 2 shards",
    # Empty texts, and those that are 0 times something, occur in all files.
    r"documents  1,600, [\d,]+ bytes, [\d,]+ tokens; [\d,]+ dropped as dup",
    r"validation \d+ documents, [\d,]+ tokens with bos and eos",
    rf"options    --data.dataset {out} --data.tokenizer bytes"
    " --data.sequence-length 32 --model.vocab-size 259",
  ):
    assert re.search(pattern, printed), (pattern, printed)


def test_inspect(prepared, capsys):
  out, _ = prepared
  command(["inspect", str(out), "--rows", "1"])
  printed = capsys.readouterr().out
  manifest = json.loads(printed.split("\n\n")[0])
  assert manifest == json.loads((out / "manifest.json").read_text())
  assert "train, row 0 of " in printed
  assert re.search(r"  \d+ tokens: 'value_1 = 0 \* 1\\n", printed)
  assert "train, row 1 of " not in printed


def test_inspect_with_the_tokenizer_that_goes_along(
  sources, small_tokenizer, tmp_path, capsys
):
  out = tmp_path / "out"
  corpus = Corpus(
    sources=(str(sources),), tokenizer=str(small_tokenizer), sequence_length=32
  )
  prepare(corpus, out, workers=0, log=lambda line: None)
  file = out / "manifest.json"
  file.write_text(file.read_text().replace(str(small_tokenizer), "/nowhere"))
  command(["inspect", str(out)])
  assert "'value_1 = 0 * 1\\n" in capsys.readouterr().out


def test_training_starts_from_it(prepared, tmp_path):
  _, printed = prepared
  named = printed.split("options    ")[1].split()
  options = dict(zip(TINY[::2], TINY[1::2], strict=True))
  options |= dict(zip(named[::2], named[1::2], strict=True))
  done = run_module(
    "train.pretrain",
    *("configs/quickstart.py", "--workdir", tmp_path / "run"),
    *("--data.data-dir", tmp_path / "data"),
    *(x for pair in options.items() for x in pair),
  )
  assert done.returncode == 0, done.stderr
  assert " after 6 updates" in done.stdout
  assert not (tmp_path / "data").exists()


def test_an_error_of_a_process_is_one_message(sources, tmp_path):
  (tmp_path / "in").mkdir()
  for k in range(3):
    (tmp_path / f"in/{k}.jsonl").write_text('{"text": "a"}\n' * 99)
  with open(tmp_path / "in/1.jsonl", "a") as file:
    file.write("broken\n")
  done = run(*options(tmp_path / "in", tmp_path / "out", "--workers", "1"))
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith(f"error: {tmp_path}/in/1.jsonl:100: no JSON")
  assert len(done.stderr.splitlines()) == 1
  assert not (tmp_path / "out").exists()
