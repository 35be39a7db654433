"""Fine-tunes a routed model on the text of Python's standard library.

    python -m train.convert import runs/smollm2 runs/routed \\
        --routing.variant delta_block --routing.gate scalar
    python -m train.finetune configs/finetune_smollm2.py \\
        --init-from runs/routed --workdir runs/finetune

The recipe of the released Delta Attention Residuals code: 5e-5, and 5e-3 for
what routes over depth. It fits any model; `--data.dataset` names other text.
"""

from deltajax.config import (
  DataConfig,
  OptimizerConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.training.load import StoredModel


def get_config(base: StoredModel) -> RunConfig:
  """The config of the run.

  Args:
    base: the model that it starts with.
  """
  return RunConfig(
    model=base.config(),
    data=DataConfig(tokenizer=base.tokenizer, sequence_length=512),
    optimizer=OptimizerConfig(
      learning_rate=5e-5,
      final_learning_rate=5e-6,
      routing_learning_rate=5e-3,
      warmup_steps=50,
    ),
    training=TrainingConfig(
      steps=1000,
      batch_size=8,
      log_every=10,
      eval_every=250,
      eval_sequences=128,
      checkpoint_every=250,
    ),
  )
