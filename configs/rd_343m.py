"""343M of the Role-Decoupled paper: separate routes for Q/K and for V.

    python -m train.pretrain configs/rd_343m.py --workdir runs/rd_343m

Recipe (arXiv 2608.01075): 2.0B tokens of FineWeb-Edu. The paper reports a
paired change against `attnres_block` of -0.0247 nats. The shape is inferred
from the published count; batch and learning rate are those of the Delta
paper, since this one's are not known here. Nothing here has reproduced it
yet.

On 16 v5e chips:

    python -m train.compile_ahead configs/rd_343m.py --topology v5e:4x4

Expected on each chip: 6.9 GiB of 15.75 at peak (arguments 3.9, temporaries
3.7).

The corpus, from FineWeb-Edu and the tokenizer of docs/data.md:

    python -m train.prepare_data build data/fineweb_edu_bpe32k \\
        --sources fineweb-edu/ --validation 0.001 \\
        --tokenizer data/bpe_32k/tokenizer.json \\
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
    model=dataclasses.replace(presets["rd_attnres-343m"], remat="full"),
    data=DataConfig(
      dataset="data/fineweb_edu_bpe32k",
      tokenizer="data/bpe_32k/tokenizer.json",
      sequence_length=2048,
    ),
    optimizer=OptimizerConfig(),
    # 15,260 x 64 x 2048 tokens are 2.0B.
    training=TrainingConfig(steps=15_260, batch_size=64),
  )
