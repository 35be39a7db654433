"""Training-step speed of variants, side by side, as ratios to `standard`.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --variants delta delta_block --width 512

The variants take turns, one update each, so that a machine whose speed drifts
slows all of them; the ratio is the median over rounds of the two neighbours.
"""

import dataclasses
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.config import (
  ModelConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.training.step import Trainer

BASELINE = "standard"


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    variants: compared with `standard`.
    width: D.
    layers: transformer layers.
    sequence_length: T.
    batch_size: sequences per update.
    num_blocks: blocks of the block variants.
    vocab_size: rows of the embedding.
    dtype: of activations.
    remat: as in ModelConfig.
    rounds: updates of each variant that are timed.
  """

  variants: tuple[str, ...] = ("delta_block", "attnres_block", "delta")
  width: int = 256
  layers: int = 8
  sequence_length: int = 256
  batch_size: int = 8
  num_blocks: int = 4
  vocab_size: int = 259
  dtype: str = "float32"
  remat: str = "none"
  rounds: int = 15


def model_config(options: Options, variant: str) -> ModelConfig:
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
    routing=RoutingConfig(variant=variant, num_blocks=options.num_blocks),
  )


def random_batch(options: Options) -> dict[str, np.ndarray]:
  shape = (options.batch_size, options.sequence_length + 1)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, options.vocab_size, shape, dtype=np.int32)
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  return {
    "tokens": tokens,
    "segment_ids": np.ones_like(tokens),
    "positions": positions,
  }


def main(options: Options) -> None:
  variants = dict.fromkeys((BASELINE, *options.variants))
  batch = random_batch(options)
  updates, states, seconds, compile_seconds = {}, {}, {}, {}
  for variant in variants:
    trainer = Trainer(
      RunConfig(
        model=model_config(options, variant),
        training=TrainingConfig(batch_size=options.batch_size),
      )
    )
    states[variant] = jax.jit(trainer.init)()
    begin = time.perf_counter()
    updates[variant] = (
      jax.jit(trainer.update, donate_argnums=0)
      .lower(states[variant], batch)
      .compile()
    )
    compile_seconds[variant] = time.perf_counter() - begin
    seconds[variant] = []
  for _ in range(options.rounds + 1):
    for variant, update in updates.items():
      begin = time.perf_counter()
      states[variant], metrics = update(states[variant], batch)
      jax.block_until_ready((states[variant], metrics))
      seconds[variant].append(time.perf_counter() - begin)

  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  print(options)
  print(f"{'variant':<24}{'tokens/s':>10}{'ratio':>8}{'compile s':>11}")
  tokens = options.batch_size * options.sequence_length
  for variant, times in seconds.items():
    ratios = [
      base / own
      for base, own in zip(seconds[BASELINE][1:], times[1:], strict=True)
    ]
    print(
      f"{variant:<24}{tokens / statistics.median(times[1:]):>10.0f}"
      f"{statistics.median(ratios):>8.3f}{compile_seconds[variant]:>11.1f}"
    )


if __name__ == "__main__":
  main(tyro.cli(Options))
