"""Delta Block at 70B: the shape of Qwen2.5-72B and Llama 3 70B, 8 blocks.

    python -m train.pretrain configs/delta_block_70b.py --workdir runs/70b

A shape to plan with, not a published run: learning rate and warm-up are those
of configs/paper_7_6b.py, untuned; updates of 512 x 4096 tokens. Meant for 512
v5p chips, parameters split over 128 and heads, mlp and vocabulary over 4:

    python -m train.compile_ahead configs/delta_block_70b.py \\
        --topology v5p:8x8x8

Expected on each chip: 31.6 GiB of 95.74 at peak (arguments 1.5, temporaries
38.2).

The corpus, from FineWeb-Edu and the tokenizer of docs/data.md:

    python -m train.prepare_data build data/fineweb_edu_4096 \\
        --sources fineweb-edu/ --validation 0.001 \\
        --tokenizer data/qwen3/tokenizer.json \\
        --sequence-length 4096
"""

from deltajax.config import (
  DataConfig,
  MeshConfig,
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
      vocab_size=151_936,
      width=8192,
      num_layers=80,
      num_heads=64,
      num_kv_heads=8,
      head_dim=128,
      mlp_width=28_672,
      rope_theta=1e6,
      tie_embeddings=False,
      remat="full",
      routing=RoutingConfig(variant="delta_block", num_blocks=8),
    ),
    data=DataConfig(
      dataset="data/fineweb_edu_4096",
      tokenizer="data/qwen3/tokenizer.json",
      sequence_length=4096,
    ),
    optimizer=OptimizerConfig(
      learning_rate=3e-4,
      final_learning_rate=3e-5,
      warmup_steps=500,
    ),
    training=TrainingConfig(steps=10_000, batch_size=512),
    mesh=MeshConfig(data=1, fsdp=128, tensor=4),
  )
