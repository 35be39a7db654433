"""Speed of preparation beside the tokenizer library's own, and its memory.

    python benchmarks/prepare_data.py
    python benchmarks/prepare_data.py --memory --megabytes 1000

Text is generated: words of syllables, as frequent as Zipf says, in the schema
of FineWeb-Edu, and a byte-level BPE tokenizer trained on it. The rate to
compare with is `encode_batch` of the same texts on as many threads as
preparation has processes, without reading and writing; preparation is measured
from the start of the command to the finished data set. `--memory` prepares
only, and adds up what all processes hold, shared pages counted in each. Linux
only.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
import dataclasses
import multiprocessing
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.config import ConfigError
from deltajax.data.workers import available_cores
from deltajax.routing.validation import check_name
from train.cli import check_json_file, main, write_json_file

ROOT = pathlib.Path(__file__).parents[1]
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    megabytes: of text, in millions of bytes.
    files: that it is in.
    vocab_size: of the tokenizer.
    tokenizer: `bpe`, or `bytes` (with --memory).
    sequence_length: T.
    workers: processes, and threads of the library; None for all cores, 0 for
      the process of the command.
    rounds: how often each is measured, in turns; the median counts.
    memory: measure memory instead of speed.
    workdir: where everything is written; it is removed.
    json: also write the rows to this file.
  """

  megabytes: float = 256
  files: int = 8
  vocab_size: int = 32_000
  tokenizer: str = "bpe"
  sequence_length: int = 1024
  workers: int | None = None
  rounds: int = 3
  memory: bool = False
  workdir: pathlib.Path = pathlib.Path(tempfile.gettempdir())
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Speed:
  """One round, in millions of bytes of text."""

  library_per_second: float
  prepare_per_second: float
  library_per_cpu_second: float
  prepare_per_cpu_second: float

  @property
  def ratio(self) -> float:
    """By the clock."""
    return self.prepare_per_second / self.library_per_second

  @property
  def cpu_ratio(self) -> float:
    """By the time of the cores, whoever else uses them."""
    return self.prepare_per_cpu_second / self.library_per_cpu_second


def generated(count: int, seed: int = 0) -> list[str]:
  """Documents of 100 to 1200 words."""
  rng = np.random.default_rng(seed)
  onsets = [*"bcdfghjklmnprstvwz", *("st", "tr", "ch", "sh", "th", "br", "pl")]
  vowels = [*"aeiou", *("ea", "ou", "ai", "io")]
  syllables = [
    x + y + z for x in onsets for y in vowels for z in ("", *"nrstl")
  ]
  words = [
    "".join(rng.choice(syllables, size)) for size in rng.integers(1, 5, 50_000)
  ]
  total = np.cumsum(1 / np.arange(1, len(words) + 1) ** 1.05)
  texts = []
  for size in rng.integers(100, 1200, count):
    found = np.searchsorted(total, rng.random(size) * total[-1])
    some = [words[k] for k in found]
    texts.append(
      " ".join(
        " ".join(some[k : k + 14]).capitalize() + "."
        for k in range(0, size, 14)
      )
    )
  return texts


def documents(megabytes: float) -> Iterator[str]:
  """A few thousand texts again and again, each with a number of its own."""
  pool = generated(min(2000, int(megabytes * 200) + 100))
  size = number = 0
  while size < megabytes * 1e6:
    text = f"{number} {pool[number % len(pool)]}"
    size += len(text)
    number += 1
    yield text


def write_corpus(options: Options, directory: pathlib.Path) -> None:
  """Parquet files in FineWeb-Edu's schema."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  texts = documents(options.megabytes)
  limit = options.megabytes * 1e6 / options.files
  for k in range(options.files):
    file = directory / f"{k:03}.parquet"
    schema = pa.schema(
      [
        *(pa.field(x, pa.string()) for x in ("text", "id", "dump", "url")),
        pa.field("token_count", pa.int64()),
      ]
    )
    size = 0
    with pq.ParquetWriter(file, schema) as writer:
      while size < limit:
        some = [text for text, _ in zip(texts, range(1000), strict=False)]
        if not some:
          break
        size += sum(map(len, some))
        n = len(some)
        columns = [some, ["id"] * n, ["dump"] * n, ["url"] * n, [0] * n]
        writer.write_table(pa.table(columns, schema=schema))


def write_tokenizer(options: Options, directory: pathlib.Path) -> None:
  """Trains a byte-level BPE on some of the text."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  found = tokenizers.Tokenizer(models.BPE())
  found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  found.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=options.vocab_size,
    special_tokens=["<|end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  found.train_from_iterator(documents(min(options.megabytes, 8)), trainer)
  found.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')


def library(work: pathlib.Path, threads: int) -> tuple[int, float, float]:
  """Bytes, and seconds of `encode_batch`, by the clock and of the cores."""
  os.environ["RAYON_NUM_THREADS"] = str(threads)
  os.environ["TOKENIZERS_PARALLELISM"] = "true"
  import pyarrow.parquet as pq
  import tokenizers

  tokenizer = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
  size, seconds, cpu_seconds = 0, 0.0, 0.0
  for file in sorted((work / "corpus").iterdir()):
    texts = pq.read_table(file, columns=["text"])["text"].to_pylist()
    size += sum(len(text.encode()) for text in texts)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    tokenizer.encode_batch(texts, add_special_tokens=False)
    seconds += time.perf_counter() - begin
    cpu_seconds += time.process_time() - cpu_begin
  return size, seconds, cpu_seconds


def start_prepare(
  options: Options, work: pathlib.Path, workers: int
) -> subprocess.Popen:
  """Starts the command."""
  tokenizer = "bytes" if options.tokenizer == "bytes" else str(work)
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "train.prepare_data", "build", str(work / "out")),
      *("--sources", str(work / "corpus"), "--tokenizer", tokenizer),
      *("--sequence-length", str(options.sequence_length)),
      *("--validation", "0.05", "--test", "0", "--workers", str(workers)),
    ],
    cwd=ROOT,
    stdout=sys.stderr,
  )


def check_done(process: subprocess.Popen) -> None:
  if process.wait():
    raise SystemExit(f"preparation failed with exit code {process.returncode}")


def measure_speed(options: Options, work: pathlib.Path, workers: int) -> Speed:
  context = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(1, context) as executor:
    size, seconds, cpu = executor.submit(
      library, work, max(1, workers)
    ).result()
  shutil.rmtree(work / "out", ignore_errors=True)
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  begin = time.perf_counter()
  check_done(start_prepare(options, work, workers))
  own_seconds = time.perf_counter() - begin
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  own_cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
  size = size / 1e6
  return Speed(size / seconds, size / own_seconds, size / cpu, size / own_cpu)


def measure_memory(
  options: Options, work: pathlib.Path, workers: int
) -> dict[str, Any]:
  """Resident bytes of the command and all its processes, at most."""
  process = start_prepare(options, work, workers)
  peak, count = 0, 0
  while process.poll() is None:
    sizes = [resident(pid) for pid in family(process.pid)]
    peak, count = max(peak, sum(sizes)), max(count, len(sizes))
    time.sleep(0.1)
  check_done(process)
  return {"peak_bytes": peak, "processes": count}


def family(pid: int) -> list[int]:
  """A process and all below it."""
  children = [
    int(child)
    for file in pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    for child in read(file).split()
  ]
  return [pid, *(found for child in children for found in family(child))]


def resident(pid: int) -> int:
  pages = read(pathlib.Path(f"/proc/{pid}/statm")).split()
  return int(pages[1]) * os.sysconf("SC_PAGESIZE") if pages else 0


def read(file: pathlib.Path) -> str:
  try:
    return file.read_text()
  except OSError:  # It has ended.
    return ""


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  check_name("tokenizer", options.tokenizer, ("bpe", "bytes"))
  if options.tokenizer == "bytes" and not options.memory:
    raise ConfigError("tokenizer 'bytes' has no library to compare with.")
  workers = options.workers
  if workers is None:
    workers = available_cores()
  rows: list[dict[str, Any]] = []
  with tempfile.TemporaryDirectory(dir=options.workdir) as directory:
    work = pathlib.Path(directory)
    (work / "corpus").mkdir()
    write_corpus(options, work / "corpus")
    if options.tokenizer == "bpe":
      write_tokenizer(options, work)
    if options.memory:
      rows.append(measure_memory(options, work, workers))
      print(
        f"{options.megabytes:g} MB of text: {rows[0]['peak_bytes'] / MIB:.0f}"
        f" MiB in {rows[0]['processes']} processes"
      )
    else:
      print("MB/s: library  prepare  ratio   MB/CPU-s: library  prepare  ratio")
      speeds = []
      for _ in range(options.rounds):
        x = measure_speed(options, work, workers)
        speeds.append(x)
        rows.append(
          dataclasses.asdict(x) | {"ratio": x.ratio, "cpu_ratio": x.cpu_ratio}
        )
        print(
          f"{x.library_per_second:13.2f}{x.prepare_per_second:9.2f}"
          f"{x.ratio:7.3f}{x.library_per_cpu_second:20.2f}"
          f"{x.prepare_per_cpu_second:9.2f}{x.cpu_ratio:7.3f}",
          flush=True,
        )
      ratio = statistics.median(x.ratio for x in speeds)
      cpu_ratio = statistics.median(x.cpu_ratio for x in speeds)
      print(f"median ratio {ratio:.3f}, of CPU time {cpu_ratio:.3f}")
  write_json_file(options.json, rows)


if __name__ == "__main__":
  main(command)
