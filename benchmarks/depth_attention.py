"""Speed of one pass of R reads over the depth memory, forward and backward.

    python benchmarks/depth_attention.py
    python benchmarks/depth_attention.py --slots 9 --widths 4096 --json F

Bytes are those that a pass must move: forward every source once and R mixes,
backward every source and its gradient, read and written, and R mixes and their
gradients; and a few float32 numbers per token. Beside them is what the TPU
kernel moves, read off its blocks: for each token and read vectors of D in the
dtype of the memory, and float32 scalars. On a GPU or TPU the table has the time
of the implementation that is chosen there, the bandwidth that it amounts to,
the fraction of a large copy measured in the same run, and the time of XLA
relative to it. On a CPU it has bytes alone: times say nothing there.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.kernels import tpu_plan
from deltajax.routing.depth_attention import choose_reader, READERS
from deltajax.routing.partial_read import PartialRead
from deltajax.routing.readers import case_of, read_slots
from train.cli import check_json_file, main, write_json_file

EPS = 1e-6
COPY_BYTES = 2**30
# Calls between two looks at the clock: what it costs to start one is hidden
# behind the one before.
QUEUED = 16
DIRECTIONS = ("forward", "backward")
TPU = "TPU v5"  # tiles are those of a v5p


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    slots: S.
    widths: D.
    reads: R.
    sequence_lengths: T, of one sequence.
    dtype: of the memory.
    implementation: None for the one that is chosen on this platform.
    rounds: of which the median counts.
    json: also write the rows to this file.
  """

  slots: tuple[int, ...] = (2, 9, 33, 73)
  widths: tuple[int, ...] = (1024, 4096)
  reads: tuple[int, ...] = (1, 2)
  sequence_lengths: tuple[int, ...] = (8192,)
  dtype: str = "bfloat16"
  implementation: str | None = None
  rounds: int = 10
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """One pass; what was not measured is None.

  Attributes:
    direction: `forward` or `backward`.
    slots: S.
    width: D.
    sequence_length: T.
    reads: R.
    implementation: of the pass.
    bytes: that it must move.
    tpu_vectors: that the TPU kernel moves, per token and read; None where it
      does not serve.
    tpu_scalars: likewise.
    seconds: that it takes.
    of_copy: its bandwidth relative to that of a large copy.
    xla_seconds: of the same pass in XLA.
  """

  direction: str
  slots: int
  width: int
  sequence_length: int
  reads: int
  implementation: str
  bytes: int
  tpu_vectors: float | None
  tpu_scalars: float | None
  seconds: float | None = None
  of_copy: float | None = None
  xla_seconds: float | None = None


def bytes_moved(direction: str, S, D, T, R, dtype) -> int:
  """Bytes that a pass must move."""
  vectors = {"forward": S + R, "backward": 3 * S + 2 * R}[direction]
  scalars = {"forward": R, "backward": 2 * R}[direction]
  return T * (vectors * D * jnp.dtype(dtype).itemsize + 4 * scalars)


def tpu_traffic(direction: str, S, D, T, R, dtype) -> tuple:
  """Vectors and scalars that the TPU kernel moves, per token and read.

  None where no tile fits.
  """
  try:
    plan = tpu_plan.Plan.make(
      jax.ShapeDtypeStruct((R, D), jnp.float32),
      jax.ShapeDtypeStruct((S, 1, T, D), jnp.dtype(dtype)),
      1,
      EPS,
      backward=direction == "backward",
      device_kind=TPU,
    )
  except ValueError:
    return None, None
  return plan.traffic.vectors / R, plan.traffic.scalars / R


@functools.partial(jax.jit, static_argnums=range(5))
def random_arrays(S, D, T, R, dtype):
  keys = jax.random.split(jax.random.key(0), 4)
  return (
    jax.random.normal(keys[0], (R, D)) / 8,
    jax.random.normal(keys[1], (S, 1, T, D), dtype),
    PartialRead(
      jax.random.normal(keys[2], (R, 1, T, D), dtype),
      jax.random.normal(keys[3], (R, 1, 1, T)),
    ),
  )


def passes(name: str, S, D, T, R, dtype) -> dict[str, tuple[Callable, tuple]]:
  """Jitted forward and backward passes with their arguments."""
  queries, slots, d_read = random_arrays(S, D, T, R, dtype)
  visible = jnp.full(R, S, jnp.int32)
  case = case_of(queries, slots, 1, EPS)
  reader = READERS[name]

  @jax.jit
  def forward(queries, slots, visible):
    return read_slots(reader, queries, slots, visible, case)[0]

  def backward(queries, slots, visible, read, d_read, d_slots):
    return reader.backward(queries, slots, visible, read, d_read, d_slots, case)

  read = forward(queries, slots, visible)
  return {
    "forward": (forward, (queries, slots, visible)),
    "backward": (
      jax.jit(backward, donate_argnums=5),
      (queries, slots, visible, read, d_read),
    ),
  }


def seconds_of(run: Callable, arguments: tuple, rounds: int) -> float:
  """Median time of a call, of several that are queued one behind the other.

  The gradient of the memory is handed from call to call.
  """
  d_slots: Any = None
  times = []
  backward = len(arguments) == 5
  if backward:
    d_slots = jnp.zeros_like(arguments[1])
  for _ in range(rounds + 2):
    jax.block_until_ready((arguments, d_slots))
    begin = time.perf_counter()
    for _ in range(QUEUED):
      found = run(*arguments, *((d_slots,) if backward else ()))
      if backward:
        d_slots = found[1]
    jax.block_until_ready(found)
    times.append((time.perf_counter() - begin) / QUEUED)
  return statistics.median(times[2:])


def copy_bandwidth(rounds: int) -> float:
  """Bytes per second, read and written, of a copy of 1 GiB."""
  x = jnp.zeros(COPY_BYTES // 4, jnp.float32)
  seconds = seconds_of(jax.jit(lambda x: x + 1), (x,), rounds)
  return 2 * COPY_BYTES / seconds


def measure(options: Options) -> Iterator[Row]:
  on_cpu = jax.default_backend() == "cpu"
  bandwidth = None if on_cpu else copy_bandwidth(options.rounds)
  shapes = [
    (S, D, T, R)
    for D in options.widths
    for T in options.sequence_lengths
    for S in options.slots
    for R in options.reads
  ]
  for S, D, T, R in shapes:
    case = case_of(
      jax.ShapeDtypeStruct((R, D), jnp.float32),
      jax.ShapeDtypeStruct((S, 1, T, D), jnp.dtype(options.dtype)),
      1,
      EPS,
    )
    name = choose_reader(
      case, options.implementation, jax.default_backend()
    ).name
    own, xla = {}, {}
    if bandwidth is not None:
      for times, reader in ((own, name), (xla, "xla")):
        for direction, timed in passes(
          reader, S, D, T, R, options.dtype
        ).items():
          times[direction] = seconds_of(*timed, options.rounds)
    for direction in DIRECTIONS:
      size = bytes_moved(direction, S, D, T, R, options.dtype)
      traffic = tpu_traffic(direction, S, D, T, R, options.dtype)
      row = Row(direction, S, D, T, R, name, size, *traffic)
      if bandwidth is not None:
        row = dataclasses.replace(
          row,
          seconds=own[direction],
          of_copy=size / own[direction] / bandwidth,
          xla_seconds=xla[direction],
        )
      yield row


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  print(options)
  print(
    f"{'pass':<10}{'S':>4}{'D':>6}{'T':>7}{'R':>3}  {'by':<16}{'MB':>9}"
    f"{'vectors':>9}{'scalars':>9}"
    f"{'ms':>9}{'GB/s':>8}{'of copy':>9}{'XLA':>7}"
  )
  rows = []
  for row in measure(options):
    line = (
      f"{row.direction:<10}{row.slots:>4}{row.width:>6}{row.sequence_length:>7}"
      f"{row.reads:>3}  {row.implementation:<16}{row.bytes / 1e6:>9.1f}"
    )
    if row.tpu_vectors and row.tpu_scalars:
      line += f"{row.tpu_vectors:>9.2f}{row.tpu_scalars:>9.1f}"
    else:
      line += f"{'-':>9}{'-':>9}"
    if row.seconds and row.xla_seconds:
      line += (
        f"{row.seconds * 1e3:>9.3f}{row.bytes / row.seconds / 1e9:>8.0f}"
        f"{row.of_copy:>9.2f}{row.xla_seconds / row.seconds:>6.2f}x"
      )
    print(line, flush=True)
    rows.append(dataclasses.asdict(row))
  write_json_file(options.json, rows)


if __name__ == "__main__":
  main(command)
