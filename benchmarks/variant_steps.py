"""Does a training step of every variant agree, with the kernel and in XLA?

    python benchmarks/variant_steps.py --json F
    python benchmarks/variant_steps.py --implementation interpret

A tiny model takes a step with the kernel of this platform (on a CPU the one for
GPUs, interpreted) and again with `xla`, from the same parameters: loss, norm of
the gradient and norm of the new parameters must be finite and agree. Variants
that learn no read have no use for a kernel; theirs must be finite. Exit code 1
if anything is not so. Compiling takes the time: several variants at once.
"""

from collections.abc import Iterator
from concurrent import futures
import dataclasses
import math
import os
import pathlib
import sys
from typing import NamedTuple

import jax
import numpy as np
import optax
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.common import random_batch
from deltajax.config import (
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.routing.depth_attention import READERS
from deltajax.routing.validation import check_name
from deltajax.routing.variants import VARIANTS
from deltajax.training.mesh import make_sharding
from deltajax.training.step import Trainer
from train.cli import check_json_file, main, RUN_ERROR, write_json_file

KERNELS = {
  "gpu": "pallas_triton",
  "tpu": "pallas_tpu",
  "cpu": "interpret_triton",
}
# Relative; matrix products of GPUs round float32 to 10 bits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
LENGTH, BATCH = 40, 2


@dataclasses.dataclass(frozen=True)
class Options:
  """What is compared.

  Attributes:
    variants: of the routing.
    implementation: of the depth attention; None for this platform's kernel.
    width: of the model, a multiple of 16.
    layers: transformer layers.
    dtype: of activations.
    json: also write the rows to this file.
  """

  variants: tuple[str, ...] = tuple(VARIANTS)
  implementation: str | None = None
  width: int = 96
  layers: int = 4
  dtype: str = "float32"
  json: pathlib.Path | None = None


class Step(NamedTuple):
  """What an update gives.

  Attributes:
    loss: before it.
    gradient: its norm.
    params: norm of the new parameters.
  """

  loss: float
  gradient: float
  params: float


@dataclasses.dataclass(frozen=True)
class Row:
  """A variant, compared.

  Attributes:
    variant: of the routing.
    implementation: of the depth attention; None without learned reads.
    found: with it.
    expected: with `xla`.
    error: what went wrong; None if nothing did.
  """

  variant: str
  implementation: str | None
  found: Step | None = None
  expected: Step | None = None
  error: str | None = None


def run_config(options: Options, variant: str, reader: str) -> RunConfig:
  learned = VARIANTS[variant].learned
  return RunConfig(
    model=ModelConfig(
      vocab_size=64,
      width=options.width,
      num_layers=options.layers,
      num_heads=options.width // 16,
      num_kv_heads=options.width // 16,
      head_dim=16,
      mlp_width=2 * options.width,
      dtype=options.dtype,
      attention="xla",
      depth_attention=reader,
      routing=RoutingConfig(
        variant=variant, num_blocks=2, query_init_std=0.5 if learned else 0.0
      ),
    ),
    data=DataConfig(sequence_length=LENGTH),
    optimizer=OptimizerConfig(warmup_steps=0),
    training=TrainingConfig(batch_size=BATCH),
    mesh=MeshConfig(data=1),
  )


def one_step(config: RunConfig) -> Step:
  """The first update, and the initial parameters, in one program."""
  trainer = Trainer(config, make_sharding(config, jax.devices()[:1]))

  @jax.jit
  def step(batch):
    state, metrics = trainer.update(trainer.init(), batch)
    norm = optax.tree.norm(state.params)
    return metrics["train/loss"], metrics["train/grad_norm"], norm

  batch = random_batch(config.model.vocab_size, BATCH, LENGTH)
  return Step(*map(float, step(batch)))


def compare(options: Options, variant: str, reader: str) -> Row:
  learned = VARIANTS[variant].learned
  row = Row(variant, reader if learned else None)
  try:
    expected = one_step(run_config(options, variant, "xla"))
    found = expected
    if learned:
      found = one_step(run_config(options, variant, reader))
  except Exception as error:  # Whatever a compiler or a device may say.
    return dataclasses.replace(row, error=str(error))
  tolerance = TOLERANCE[options.dtype]
  error = None
  if not all(map(math.isfinite, (*found, *expected))):
    error = "not finite"
  elif not np.allclose(found, expected, rtol=tolerance, atol=0):
    error = f"differs by more than {tolerance}"
  return dataclasses.replace(row, found=found, expected=expected, error=error)


def measure(options: Options) -> Iterator[Row]:
  reader = options.implementation or KERNELS[jax.default_backend()]
  threads = max(1, min(8, (os.cpu_count() or 1) // 2))
  with futures.ThreadPoolExecutor(threads) as pool:
    yield from pool.map(
      lambda variant: compare(options, variant, reader), options.variants
    )


def as_line(row: Row) -> str:
  line = f"{row.variant:<24}{row.implementation or '':<18}"
  if row.found and row.expected:
    line += "".join(f"{x:>12.6f}" for x in (*row.found, *row.expected))
  return f"{line}  {'good' if row.error is None else row.error}"


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  check_name("dtype", options.dtype, TOLERANCE)
  for variant in options.variants:
    check_name("variant", variant, VARIANTS)
  if options.implementation is not None:
    check_name("implementation", options.implementation, READERS)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  print(
    f"{'variant':<24}{'depth attention':<18}{'loss':>12}{'gradient':>12}"
    f"{'params':>12}{'loss, xla':>12}{'gradient':>12}{'params':>12}"
  )
  rows = []
  for row in measure(options):
    print(as_line(row), flush=True)
    rows.append(row)
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])
  good = sum(row.error is None for row in rows)
  print(f"{good} of {len(rows)} variants are good")
  if good < len(rows):
    raise SystemExit(RUN_ERROR)


if __name__ == "__main__":
  main(command)
