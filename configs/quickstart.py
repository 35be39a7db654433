"""Delta Block learns Python: a first run on any machine.

    python -m train.pretrain configs/quickstart.py --workdir runs/quickstart

Byte-level text of the interpreter's own standard library, 1.2 million
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
      num_heads=2,
      num_kv_heads=1,
      head_dim=64,
      mlp_width=256,
      dtype="float32",
      routing=RoutingConfig(variant="delta_block", num_blocks=4),
    ),
    data=DataConfig(sequence_length=128),
    optimizer=OptimizerConfig(
      learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=50
    ),
    training=TrainingConfig(
      steps=600,
      batch_size=8,
      log_every=20,
      eval_every=200,
      eval_sequences=256,
      checkpoint_every=200,
    ),
  )
