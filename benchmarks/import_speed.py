"""Time and memory of `load_pretrained`, on random checkpoints of real shapes.

    python benchmarks/import_speed.py
    python benchmarks/import_speed.py --presets qwen3-1.7b --stored bfloat16

For each preset, one process writes a directory with `save_pretrained`, and a
new one reads it. Memory is what that process needed at its peak beyond what it
had before, as a multiple of the parameters; the bound is 1.3 plus the largest
tensor. Linux only, which tells the peak of a process.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
import dataclasses
import math
import multiprocessing
import pathlib
import re
import sys
import tempfile
import time
from typing import Any, TypeVar

import jax
import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16)
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.checkpoints.names import parameter_shapes, tensor_places
from deltajax.config import ModelConfig
from deltajax.models.presets import presets
from train.cli import check_json_file, main, write_json_file

T = TypeVar("T")

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    presets: shapes.
    layers: depth, in place of the presets' own.
    stored: dtype of the files.
    loaded: dtype of the parameters.
    rounds: how often each is read; the fastest counts.
    workdir: where the checkpoints are written; they are removed.
    json: also write the rows to this file.
  """

  presets: tuple[str, ...] = ("smollm2-135m",)
  layers: int | None = None
  stored: str = "bfloat16"
  loaded: str = "float32"
  rounds: int = 1
  workdir: pathlib.Path = pathlib.Path(tempfile.gettempdir())
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """One checkpoint."""

  preset: str
  stored: str
  loaded: str
  parameter_bytes: int
  largest_tensor_bytes: int
  seconds: float
  peak_bytes: int

  @property
  def ratio(self) -> float:
    """Peak over parameters."""
    return self.peak_bytes / self.parameter_bytes

  @property
  def bound(self) -> float:
    """What the ratio may be."""
    return 1.3 + self.largest_tensor_bytes / self.parameter_bytes


def status_bytes(name: str) -> int:
  """A line of /proc/self/status: VmHWM is the peak, VmRSS what is used now."""
  text = pathlib.Path("/proc/self/status").read_text()
  found = re.search(rf"{name}:\s+(\d+) kB", text)
  assert found is not None
  return int(found[1]) * 1024


def in_new_process(function: Callable[..., T], *args: Any) -> T:
  context = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(1, context) as executor:
    return executor.submit(function, *args).result()


def write(directory: str, config: ModelConfig, dtype: str) -> None:
  """Random values without the time that they take: one block, repeated."""
  block = np.random.default_rng(0).standard_normal(2**20, np.float32)
  params = jax.tree.map(
    lambda x: np.resize(block.astype(dtype), x.shape), parameter_shapes(config)
  )
  save_pretrained(directory, config, params)


def read(directory: str, dtype: str) -> tuple[float, int]:
  """Returns seconds, and bytes at the peak beyond those before."""
  jax.devices()
  before = status_bytes("VmRSS")
  start = time.perf_counter()
  params = load_pretrained(directory, param_dtype=dtype).params
  jax.block_until_ready(params)
  seconds = time.perf_counter() - start
  return seconds, status_bytes("VmHWM") - before


def measure(options: Options, preset: str) -> Row:
  config = presets[preset]
  if options.layers is not None:
    config = dataclasses.replace(config, num_layers=options.layers)
  with tempfile.TemporaryDirectory(dir=options.workdir) as directory:
    in_new_process(write, directory, config, options.stored)
    found = [
      in_new_process(read, directory, options.loaded)
      for _ in range(options.rounds)
    ]
  itemsize = np.dtype(options.loaded).itemsize
  sizes = [
    math.prod(place.shape) * itemsize
    for place in tensor_places(config).values()
  ]
  return Row(
    preset=preset,
    stored=options.stored,
    loaded=options.loaded,
    parameter_bytes=sum(sizes),
    largest_tensor_bytes=max(sizes),
    seconds=min(seconds for seconds, _ in found),
    peak_bytes=max(peak for _, peak in found),
  )


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  rows = []
  print(
    f"{'preset':<16}{'stored':>10}{'loaded':>10}{'MiB':>9}{'seconds':>9}"
    f"{'peak MiB':>10}{'ratio':>7}{'bound':>7}"
  )
  for preset in options.presets:
    row = measure(options, preset)
    rows.append(row)
    print(
      f"{row.preset:<16}{row.stored:>10}{row.loaded:>10}"
      f"{row.parameter_bytes / MIB:>9.0f}{row.seconds:>9.2f}"
      f"{row.peak_bytes / MIB:>10.0f}{row.ratio:>7.2f}{row.bound:>7.2f}",
      flush=True,
    )
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
  main(command)
