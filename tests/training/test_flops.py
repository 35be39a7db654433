import dataclasses

import jax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.config import (
  DataConfig,
  ModelConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.training.flops import matrix_parameters, model_flops

MODEL = ModelConfig(
  vocab_size=10,
  width=4,
  num_layers=3,
  num_heads=2,
  num_kv_heads=1,
  head_dim=6,
  mlp_width=5,
  routing=RoutingConfig(variant="delta_block", num_blocks=3),
)


def test_flops_of_a_step_counted_by_hand():
  # One layer: Q and output 4 x 12, K and V 4 x 6, three of 4 x 5; head 4 x 10.
  n = 3 * (2 * 48 + 2 * 24 + 3 * 20) + 40
  tokens = 2 * 7
  # Q K^T: 2 * 12 for each of 7 keys; with V as many; backward twice that.
  attention = 3 * 7 * (2 * 12 + 2 * 12) * 3
  config = RunConfig(
    model=MODEL,
    data=DataConfig(sequence_length=7),
    training=TrainingConfig(batch_size=2),
  )
  assert model_flops(config) == tokens * (6 * n + attention)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_those_of_the_model(tied):
  model = dataclasses.replace(MODEL, tie_embeddings=tied)
  sizes = {
    jax.tree_util.keystr(path): leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      parameter_shapes(model)
    )
  }
  multiplied = "embedding" if tied else "head"
  assert matrix_parameters(model) == sum(
    size
    for name, size in sizes.items()
    if "kernel" in name or multiplied in name
  )
