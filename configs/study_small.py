"""The study in 20 minutes: four arms, two seeds, a third of the updates.

    python -m train.study configs/study_small.py --out runs/study_small

It shows how the study works; it is too short to tell the arms apart.
"""

from configs.study import make_study
from deltajax.comparison.study import Study


def get_config() -> Study:
  """The study."""
  return make_study(
    {
      "standard": ("standard", "embedding_skip"),
      "delta_block": ("attnres_block", "delta_block"),
    },
    (2e-3, 4e-3),
    seeds=(0, 1),
    steps=300,
    eval_every=150,
    checkpoint_every=150,
    eval_sequences=512,
  )
