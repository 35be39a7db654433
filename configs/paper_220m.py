"""220M of the Delta paper: Delta Block on FineWeb-Edu.

    python -m train.pretrain configs/paper_220m.py --workdir runs/paper_220m

Other variants: --model.routing.variant NAME. The paper's recipe (arXiv
2605.18855): 10,000 updates of 64 x 2048 tokens. Its validation perplexities:
38.71 (standard), 37.30 (attnres_full), 37.08 (delta_block), 36.83 (delta).
Nothing here has reproduced them yet.

Meant for one 80 GB GPU or four v5e chips, on which a step takes four turns:

    python -m train.compile_ahead configs/paper_220m.py --topology v5e:2x2 \\
        --training.accumulation 4

Expected on each chip: 5.6 GiB of 15.75 at peak (arguments 2.5, temporaries
5.6).

The corpus, from FineWeb-Edu and the tokenizer of docs/data.md:

    python -m train.prepare_data build data/fineweb_edu \\
        --sources fineweb-edu/ --validation 0.001 \\
        --tokenizer data/qwen3/tokenizer.json \\
        --sequence-length 2048

The shape alone can be tried on the built-in corpus:

    --data.dataset python_stdlib --data.tokenizer bytes
"""

import dataclasses

from deltajax import presets
from deltajax.config import (
  DataConfig,
  OptimizerConfig,
  RunConfig,
  TrainingConfig,
)


def get_config() -> RunConfig:
  """The config of the run."""
  return RunConfig(
    model=dataclasses.replace(presets["delta_block-220m"], remat="full"),
    data=DataConfig(
      dataset="data/fineweb_edu",
      tokenizer="data/qwen3/tokenizer.json",
      sequence_length=2048,
    ),
    optimizer=OptimizerConfig(
      learning_rate=6e-4,
      final_learning_rate=6e-5,
      warmup_steps=1000,
    ),
    training=TrainingConfig(steps=10_000, batch_size=64),
  )
