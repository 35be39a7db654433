"""Memory of value-and-grad by variant and depth, without running anything.

    python benchmarks/memory.py
    python benchmarks/memory.py --targets v5p:1x1x1 --variants delta_block
    python benchmarks/memory.py --config configs/paper_1044m.py \\
        --targets v5p:1x1x1 --batch-size 4 --sequence-length 2048

Every row is the loss and its gradient compiled for one device of a target:
what the compiler reserves for temporaries, and the peak of everything. The
last column is the temporaries relative to half as many layers (where that is a
row too): 2 is linear in depth, 4 is quadratic. Exit code 1: a program does not
fit its device; it has no row, and the compiler's own figures are printed.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import sys

import jax
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.config import (
  DataConfig,
  MeshConfig,
  ModelConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.routing.variants import VARIANTS
from deltajax.training.ahead import (
  abstract_batch,
  compile_lowered,
  DoesNotFitError,
  memory_use,
)
from deltajax.training.mesh import make_sharding
from deltajax.training.step import Trainer
from deltajax.training.targets import get_target
from train.cli import (
  check_json_file,
  load_config,
  main,
  RUN_ERROR,
  write_json_file,
)

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
  """What is compiled.

  Attributes:
    targets: names as for `train.compile_ahead`; the first device is used.
    config: a config file whose model is taken; without one, a model of `width`.
    variants: of the routing.
    layers: depths; with a config and none given, the depth of its model.
    width: D.
    sequence_length: T.
    batch_size: sequences.
    num_blocks: blocks of the block variants.
    dtype: of activations.
    remat: as in ModelConfig.
    scan: as in ModelConfig.
    read_group: as in ModelConfig.
    json: also write the rows to this file.
  """

  targets: tuple[str, ...] = ("cpu:1", "v5p:1x1x1")
  config: pathlib.Path | None = None
  variants: tuple[str, ...] = tuple(VARIANTS)
  layers: tuple[int, ...] = ()
  width: int = 256
  sequence_length: int = 256
  batch_size: int = 4
  num_blocks: int | None = None
  dtype: str | None = None
  remat: str | None = None
  scan: str = "append_only"
  read_group: int = 1
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """One program."""

  target: str
  config: str
  variant: str
  layers: int
  temp_bytes: int
  peak_bytes: int


def model_config(options: Options) -> ModelConfig:
  if options.config is not None:
    return load_config(str(options.config)).model
  head_dim = min(64, options.width)
  heads = options.width // head_dim
  return ModelConfig(
    vocab_size=259,
    width=options.width,
    num_layers=4,
    num_heads=heads,
    num_kv_heads=max(heads // 2, 1),
    head_dim=head_dim,
    mlp_width=4 * options.width,
    dtype="bfloat16",
    remat="full",
    routing=RoutingConfig(num_blocks=4),
  )


def run_config(options: Options, variant: str, layers: int) -> RunConfig:
  model = model_config(options)
  return RunConfig(
    model=dataclasses.replace(
      model,
      num_layers=layers,
      dtype=options.dtype or model.dtype,
      remat=options.remat or model.remat,
      scan=options.scan,
      read_group=options.read_group,
      routing=dataclasses.replace(
        model.routing,
        variant=variant,
        num_blocks=options.num_blocks or model.routing.num_blocks,
      ),
    ),
    data=DataConfig(sequence_length=options.sequence_length),
    training=TrainingConfig(batch_size=options.batch_size),
    mesh=MeshConfig(data=1),
  )


def compile_gradient(config: RunConfig, device):
  trainer = Trainer(config, make_sharding(config, [device]))

  def loss(params, batch):
    sums = trainer.loss(params, batch)
    return sums.loss / sums.tokens

  lowered = jax.jit(jax.value_and_grad(loss)).lower(
    trainer.abstract_state().params, abstract_batch(trainer)
  )
  return compile_lowered(lowered)


def measure(options: Options) -> Iterator[Row | None]:
  """Yields a row for each program; None for one that does not fit."""
  name = options.config.stem if options.config else f"width{options.width}"
  depth = model_config(options).num_layers
  depths = options.layers or ((depth,) if options.config else (32, 64))
  for target_name in options.targets:
    device = get_target(target_name).devices[0]
    for variant in options.variants:
      for layers in depths:
        config = run_config(options, variant, layers)
        try:
          compiled = compile_gradient(config, device)
        except DoesNotFitError as error:
          print(f"{target_name} {variant} {layers}: {error}", file=sys.stderr)
          yield None
          continue
        memory = memory_use(compiled, device.platform)
        yield Row(
          target=target_name,
          config=name,
          variant=variant,
          layers=layers,
          temp_bytes=memory.temp,
          peak_bytes=memory.peak,
        )


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  print(f"jax {jax.__version__}\n{options}")
  print(
    f"{'target':<12}{'config':<12}{'variant':<24}{'layers':>6}"
    f"{'temp MiB':>11}{'peak MiB':>11}{'of half':>9}"
  )
  rows: list[Row] = []
  fits = True
  for row in measure(options):
    if row is None:
      fits = False
      continue
    half = [
      old.temp_bytes
      for old in rows
      if (old.target, old.variant, 2 * old.layers)
      == (row.target, row.variant, row.layers)
    ]
    ratio = f"{row.temp_bytes / half[0]:.2f}" if half else ""
    print(
      f"{row.target:<12}{row.config:<12}{row.variant:<24}{row.layers:>6}"
      f"{row.temp_bytes / MIB:>11.1f}{row.peak_bytes / MIB:>11.1f}{ratio:>9}",
      flush=True,
    )
    rows.append(row)
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])
  if not fits:
    raise SystemExit(RUN_ERROR)


if __name__ == "__main__":
  main(command)
