"""Do the TPU kernels compile, for chips that are not here?

    python benchmarks/compile_kernels.py --json F
    python benchmarks/compile_kernels.py --chips v5p --widths 7168 --reads 2

The real compiler of every chip gets the forward and the backward pass of every
combination, bfloat16 and float32: what overflows VMEM or is not supported fails
here. Exit code 1 if anything does. Needs libtpu: pip install '.[tpu]'.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any

import jax
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.kernels import tpu, tpu_plan
from deltajax.routing.validation import check_name
from deltajax.training.targets import CHIPS, get_target
from train.cli import check_json_file, main, RUN_ERROR, write_json_file

EPS = 1e-6
DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Options:
  """What is compiled.

  Attributes:
    chips: kinds of TPU.
    slots: S.
    widths: D.
    reads: R.
    dtypes: of the memory.
    sequence_length: T, of each of two sequences.
    json: also write the rows to this file.
  """

  chips: tuple[str, ...] = ("v5e", "v5p", "v6e")
  slots: tuple[int, ...] = (2, 9, 33, 73)
  widths: tuple[int, ...] = (1024, 1280, 4096, 7168)
  reads: tuple[int, ...] = (1, 2)
  dtypes: tuple[str, ...] = ("bfloat16", "float32")
  sequence_length: int = 1024
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """A pass, compiled.

  Attributes:
    chip: kind of TPU.
    dtype: of the memory.
    width: D.
    reads: R.
    slots: S.
    direction: `forward` or `backward`.
    tile: tokens of a tile; None if none fits.
    vmem_bytes: of its blocks.
    seconds: that compiling took.
    error: why it does not compile; None if it does.
  """

  chip: str
  dtype: str
  width: int
  reads: int
  slots: int
  direction: str
  tile: int | None = None
  vmem_bytes: int | None = None
  seconds: float | None = None
  error: str | None = None


def one_chip(chip: str) -> Any:
  """A description of a device."""
  return get_target(f"{chip}:{'x'.join('1' * CHIPS[chip].axes)}").devices[0]


def compile_pass(
  device: Any, backward: bool, S, D, T, R, dtype, heads: int = 1
) -> Any:
  """Compiles a pass over two sequences for a device."""
  on_device = jax.sharding.SingleDeviceSharding(device)

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

  memory = array(dtype, S, 2, T, D)
  read = (array(dtype, R, 2, T, D), array("float32", R, heads, 2, T))
  inputs = (array("float32", R, D), memory, array("int32", R))
  options = {"device_kind": device.device_kind}

  def forward_pass(*args):
    return tpu.read_forward(*args, heads, EPS, **options)

  def backward_pass(*args):
    return tpu.read_backward(*args, heads, EPS, **options)

  if not backward:
    return jax.jit(forward_pass).lower(*inputs).compile()
  inputs = (*inputs, *read, *read, memory)
  return jax.jit(backward_pass, donate_argnums=7).lower(*inputs).compile()


def try_pass(device: Any, row: Row, length: int) -> Row:
  backward = row.direction == "backward"
  case = (row.slots, row.width, length, row.reads, row.dtype)
  begin = time.perf_counter()
  try:
    tile = tpu_plan.choose_tile(
      length,
      row.width,
      row.reads,
      1,
      row.dtype,
      backward,
      device.device_kind,
    )
    row = dataclasses.replace(row, tile=tile.tokens, vmem_bytes=tile.vmem_bytes)
    compile_pass(device, backward, *case)
  except Exception as error:  # Whatever a compiler may say.
    return dataclasses.replace(row, error=str(error))
  return dataclasses.replace(row, seconds=time.perf_counter() - begin)


def measure(options: Options) -> Iterator[list[Row]]:
  """Rows of each line of the table."""
  for chip in options.chips:
    device = one_chip(chip)
    for shape in itertools.product(
      options.dtypes, options.widths, options.reads
    ):
      yield [
        try_pass(
          device, Row(chip, *shape, S, direction), options.sequence_length
        )
        for direction in DIRECTIONS
        for S in options.slots
      ]


def as_line(rows: list[Row]) -> str:
  first = rows[0]
  line = f"{first.chip:<6}{first.dtype:<10}{first.width:>6}{first.reads:>3}"
  for direction in DIRECTIONS:
    own = next(row for row in rows if row.direction == direction)
    vmem = (own.vmem_bytes or 0) / tpu_plan.MIB
    line += f"{own.tile or '-':>10}{vmem:>5.0f}"
  compiled = [row for row in rows if row.error is None]
  seconds = sum(row.seconds or 0 for row in rows)
  return f"{line}{len(compiled):>10} of {len(rows)}{seconds:>8.1f}"


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  for chip in options.chips:
    check_name("TPU", chip, CHIPS)
  for dtype in options.dtypes:
    check_name("dtype", dtype, ("bfloat16", "float32"))
  print(f"jax {jax.__version__}, {options}")
  print(
    f"{'chip':<6}{'dtype':<10}{'D':>6}{'R':>3}{'forward':>10}{'MiB':>5}"
    f"{'backward':>10}{'MiB':>5}{'compiled':>15}{'s':>8}"
  )
  rows = []
  for line in measure(options):
    print(as_line(line), flush=True)
    rows += line
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])
  failed = [row for row in rows if row.error is not None]
  for row in failed:
    print(f"{row}")
  print(f"{len(rows) - len(failed)} of {len(rows)} passes compile")
  if failed:
    raise SystemExit(RUN_ERROR)


if __name__ == "__main__":
  main(command)
