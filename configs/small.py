"""Twelve layers of width 64: what the comparisons here have in common.

    python -m train.pretrain configs/small.py --workdir runs/small

Byte-level text of the interpreter's own standard library, a million tokens of
it; a Delta Block model of 0.5 million parameters. About three minutes on two
idle CPU cores.
"""

from deltajax.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)


def get_config() -> RunConfig:
  """The config of the run."""
  return RunConfig(
    model=ModelConfig(
      vocab_size=259,
      width=64,
      num_layers=12,
      num_heads=2,
      num_kv_heads=1,
      head_dim=32,
      mlp_width=160,
      dtype="float32",
      routing=RoutingConfig(variant="delta_block", num_blocks=4),
    ),
    data=DataConfig(sequence_length=128),
    optimizer=OptimizerConfig(
      learning_rate=4e-3, final_learning_rate=4e-4, warmup_steps=100
    ),
    training=TrainingConfig(
      steps=1000,
      batch_size=8,
      log_every=10,
      eval_every=500,
      eval_sequences=1024,
      checkpoint_every=500,
      keep_checkpoints=1,
    ),
  )
