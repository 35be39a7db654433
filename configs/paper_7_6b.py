"""7.6B of the Delta paper: Delta Block on FineWeb-Edu.

    python -m train.pretrain configs/paper_7_6b.py --workdir runs/paper_7_6b

Other variants: --model.routing.variant NAME. The paper's recipe (arXiv
2605.18855): 10,000 updates of 64 x 2048 tokens. Its validation perplexities:
17.43 (standard), 18.58 (attnres_block), 16.00 (delta_block). Nothing here has
reproduced them yet.

Meant for 64 v5p chips, parameters split over all of them (other machines:
--mesh.fsdp N); at 1M tokens a step:

    python -m train.compile_ahead configs/paper_7_6b.py --topology v5p:4x4x4 \\
        --training.batch-size 512

Expected on each chip: 13.9 GiB of 95.74 at peak (arguments 1.3, temporaries
19.1).

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
  MeshConfig,
  OptimizerConfig,
  RunConfig,
  TrainingConfig,
)


def get_config() -> RunConfig:
  """The config of the run."""
  return RunConfig(
    model=dataclasses.replace(presets["delta_block-7.6b"], remat="full"),
    data=DataConfig(
      dataset="data/fineweb_edu",
      tokenizer="data/qwen3/tokenizer.json",
      sequence_length=2048,
    ),
    optimizer=OptimizerConfig(
      learning_rate=3e-4,
      final_learning_rate=3e-5,
      warmup_steps=500,
    ),
    training=TrainingConfig(steps=10_000, batch_size=64),
    mesh=MeshConfig(data=1, fsdp=64),
  )
