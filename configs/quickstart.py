"""Delta Block learns Python: a first run on any machine.

    python -m train.pretrain configs/quickstart.py --workdir runs/quickstart

Byte-level text of the interpreter's own standard library, 1.4 million
parameters.
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
      width=128,
      num_layers=8,
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      mlp_width=320,
      dtype="float32",
      routing=RoutingConfig(variant="delta_block", num_blocks=4),
    ),
    data=DataConfig(sequence_length=256),
    optimizer=OptimizerConfig(
      learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=50
    ),
    training=TrainingConfig(
      steps=500,
      batch_size=16,
      log_every=10,
      eval_every=100,
      eval_batches=8,
      checkpoint_every=100,
    ),
  )
