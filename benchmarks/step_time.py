"""Training-step speed of variants, side by side, as ratios to `standard`.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --variants delta delta_block --width 512
    python benchmarks/step_time.py --meshes data=8 fsdp=8 fsdp=4,tensor=2
    python benchmarks/step_time.py --preset qwen3-0.6b --dtype bfloat16 \\
        --remat full --batch-size 4 --sequence-length 2048 --json F

The variants take turns, one update each, so that a machine whose speed drifts
slows all of them; the ratio is the median over rounds of the two neighbours.
With several meshes every variant runs on each, relative to `standard` on the
first; CPUs are then split into as many virtual devices.
"""

import dataclasses
import functools
import math
import pathlib
import re
import statistics
import sys
import time

import jax
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.common import random_batch
from deltajax.config import (
  ConfigError,
  DataConfig,
  MeshConfig,
  ModelConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.models.presets import presets
from deltajax.training.mesh import make_sharding, place_own_rows
from deltajax.training.step import Trainer
from deltajax.training.summary import depth_choice
from train.cli import check_json_file, main, write_json_file

BASELINE = "standard"


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    variants: compared with `standard`.
    preset: a name of `deltajax.presets`, whose sizes are taken instead of
      `width`, `layers` and `vocab_size`.
    width: D.
    layers: transformer layers.
    sequence_length: T.
    batch_size: sequences per update.
    num_blocks: blocks of the block variants.
    vocab_size: rows of the embedding.
    dtype: of activations.
    remat: as in ModelConfig.
    rounds: updates of each variant that are timed.
    meshes: sizes of mesh axes, as fsdp=4,tensor=2; other axes have size 1.
    json: also write the rows to this file.
  """

  variants: tuple[str, ...] = ("delta_block", "attnres_block", "delta")
  preset: str | None = None
  width: int = 256
  layers: int = 8
  sequence_length: int = 256
  batch_size: int = 8
  num_blocks: int = 4
  vocab_size: int = 264
  dtype: str = "float32"
  remat: str = "none"
  rounds: int = 15
  meshes: tuple[str, ...] = ("data=1",)
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """A variant on a mesh.

  Attributes:
    variant: of the routing.
    mesh: sizes of its axes.
    tokens_per_second: of the median update.
    ratio: speed relative to `standard` on the first mesh.
    compile_seconds: of the update, with tracing.
    depth_attention: that passes over the memory.
  """

  variant: str
  mesh: str
  tokens_per_second: float
  ratio: float
  compile_seconds: float
  depth_attention: str


def mesh_config(mesh: str) -> MeshConfig:
  if not re.fullmatch(r"[a-z]+=\d+(,[a-z]+=\d+)*", mesh):
    raise ConfigError(f"--meshes {mesh}: give sizes as in fsdp=4,tensor=2.")
  sizes = dict(size.split("=") for size in mesh.split(","))
  return MeshConfig(**{"data": 1, **{k: int(n) for k, n in sizes.items()}})


def model_config(options: Options, variant: str) -> ModelConfig:
  routing = RoutingConfig(variant=variant, num_blocks=options.num_blocks)
  if options.preset is not None:
    return dataclasses.replace(
      presets[options.preset],
      dtype=options.dtype,
      remat=options.remat,
      routing=routing,
    )
  head_dim = min(64, options.width)
  heads = options.width // head_dim
  return ModelConfig(
    vocab_size=options.vocab_size,
    width=options.width,
    num_layers=options.layers,
    num_heads=heads,
    num_kv_heads=max(heads // 2, 1),
    head_dim=head_dim,
    mlp_width=4 * options.width,
    dtype=options.dtype,
    remat=options.remat,
    routing=routing,
  )


def make_trainer(options: Options, variant: str, mesh: MeshConfig) -> Trainer:
  config = RunConfig(
    model=model_config(options, variant),
    data=DataConfig(sequence_length=options.sequence_length),
    training=TrainingConfig(batch_size=options.batch_size),
    mesh=mesh,
  )
  num_devices = math.prod(dataclasses.astuple(mesh))
  return Trainer(config, make_sharding(config, jax.devices()[:num_devices]))


def _call(compiled, batch, state):
  return compiled(state, batch)


def measure(options: Options, meshes: dict[str, MeshConfig]) -> list[Row]:
  variants = dict.fromkeys((BASELINE, *options.variants))
  rows = [(variant, mesh) for mesh in meshes for variant in variants]
  updates, states, seconds, compile_seconds, readers = {}, {}, {}, {}, {}
  for row in rows:
    variant, mesh = row
    trainer = make_trainer(options, variant, meshes[mesh])
    readers[row] = depth_choice(trainer.config, trainer.sharding).name
    states[row] = trainer.compiled_init()
    batch = place_own_rows(
      trainer.sharding,
      random_batch(
        trainer.config.model.vocab_size,
        options.batch_size,
        options.sequence_length,
      ),
    )
    begin = time.perf_counter()
    compiled = trainer.jit_update().lower(states[row], batch).compile()
    updates[row] = functools.partial(_call, compiled, batch)
    compile_seconds[row] = time.perf_counter() - begin
    seconds[row] = []
  for _ in range(options.rounds + 1):
    for row, update in updates.items():
      begin = time.perf_counter()
      states[row], metrics = update(states[row])
      jax.block_until_ready((states[row], metrics))
      seconds[row].append(time.perf_counter() - begin)
  tokens = options.batch_size * options.sequence_length
  base = seconds[rows[0]][1:]
  return [
    Row(
      *row,
      tokens_per_second=tokens / statistics.median(times[1:]),
      ratio=statistics.median(
        one / own for one, own in zip(base, times[1:], strict=True)
      ),
      compile_seconds=compile_seconds[row],
      depth_attention=readers[row],
    )
    for row, times in seconds.items()
  ]


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  meshes = {name: mesh_config(name) for name in options.meshes}
  for variant in options.variants:
    model_config(options, variant)  # Raises before any work.
  most = max(math.prod(dataclasses.astuple(mesh)) for mesh in meshes.values())
  jax.config.update("jax_num_cpu_devices", most)
  rows = measure(options, meshes)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  print(options)
  print(
    f"{'variant':<24}{'mesh':<16}{'tokens/s':>10}{'ratio':>8}{'compile s':>11}"
    "  depth attention"
  )
  for row in rows:
    print(
      f"{row.variant:<24}{row.mesh:<16}{row.tokens_per_second:>10.0f}"
      f"{row.ratio:>8.3f}{row.compile_seconds:>11.1f}"
      f"  {row.depth_attention}"
    )
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
  main(command)
