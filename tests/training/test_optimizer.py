from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.config import ModelConfig, OptimizerConfig, RoutingConfig
from deltajax.training.optimizer import (
  decay_mask,
  learning_rate_schedule,
  make_optimizer,
)


def ones(**routing):
  config = ModelConfig(
    vocab_size=11,
    width=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_width=8,
    tie_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    routing=RoutingConfig(num_blocks=2, **routing),
  )
  shapes = parameter_shapes(config)
  return jax.tree.map(lambda x: jnp.ones(x.shape), shapes)


def names(mask):
  return {
    "/".join(key.key for key in path)
    for path, value in jax.tree_util.tree_leaves_with_path(mask)
    if value
  }


EVERYTHING = {"variant": "delta_block", "gate": "scalar", "null_source": True}


def test_only_matrices_are_decayed():
  layer = "layers/{}/kernel".format
  assert names(decay_mask(ones(**EVERYTHING))) == {
    "embedding",
    "head",
    *(layer(f"attention/{x}") for x in ("query", "key", "value", "output")),
    *(layer(f"mlp/{x}") for x in ("gate", "up", "down")),
  }


def test_masks_know_names_not_ranks():
  stacked = ones(**EVERYTHING)
  one_layer = stacked | {
    "layers": jax.tree.map(lambda x: x[0], stacked["layers"])
  }
  assert decay_mask(stacked) == decay_mask(one_layer)


def one_update(params, **options):
  options = {"warmup_steps": 0, "learning_rate": 0.1} | options
  optimizer = make_optimizer(OptimizerConfig(**options), steps=10)
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return updates


def test_decay_moves_matrices_only():
  params = ones(**EVERYTHING)
  plain = one_update(params, weight_decay=0.0)
  decayed = one_update(params, weight_decay=0.5)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), plain, decayed)
  assert moved == decay_mask(params)


@pytest.mark.parametrize(
  ("options", "queries", "routing"),
  [
    ({"query_multiplier": 0.0}, 0.0, 1.0),
    ({"query_multiplier": 3.0}, 3.0, 1.0),
    ({"routing_learning_rate": 0.5}, 5.0, 5.0),
    ({"routing_learning_rate": 0.5, "query_multiplier": 3.0}, 15.0, 5.0),
  ],
)
@pytest.mark.parametrize("variant", ["rd_attnres", "delta_block"])
def test_routing_has_rates_of_its_own(variant, options, queries, routing):
  everything = EVERYTHING if variant == "delta_block" else {"variant": variant}
  params = ones(**everything)
  found = traverse_util.flatten_dict(one_update(params, **options))
  plain = traverse_util.flatten_dict(one_update(params))
  seen = set()
  for path, x in plain.items():
    rate = 1.0
    if any(name.endswith("_router") for name in path):
      rate = queries if path[-1] == "query" else routing
    seen.add(rate)
    np.testing.assert_allclose(found[path], rate * x, rtol=1e-6)
  assert seen == {1.0, queries, routing}


def test_gradients_are_clipped_to_the_bound():
  optimizer = make_optimizer(OptimizerConfig(clip_norm=0.5), steps=2000)
  params = ones(**EVERYTHING)
  grads = jax.tree.map(lambda x: 100 * jnp.ones_like(x), params)
  _, state = optimizer.update(grads, optimizer.init(params), params)
  first_moment = optax.tree.get(state, "mu")
  # mu = (1 - b1) * clipped gradient
  np.testing.assert_allclose(
    optax.tree.norm(first_moment), 0.1 * 0.5, rtol=1e-4
  )


def test_schedule_starts_learning_and_ends_at_the_final_rate():
  config = OptimizerConfig(
    learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10
  )
  schedule = learning_rate_schedule(config, steps=100)
  np.testing.assert_allclose(schedule(0), 0.1, rtol=1e-6)
  np.testing.assert_allclose(schedule(9), 1.0, rtol=1e-6)
  np.testing.assert_allclose(schedule(99), 0.1, rtol=1e-5)
  rates = [float(schedule(i)) for i in range(9, 100)]
  assert rates == sorted(rates, reverse=True)


def test_no_warmup_starts_at_the_top():
  config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
  rate = learning_rate_schedule(config, steps=1000)(0)
  np.testing.assert_allclose(rate, 1.0, rtol=1e-4)
