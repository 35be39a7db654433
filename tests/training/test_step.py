import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deltajax.checkpoints.names import count_parameters
from deltajax.config import (
  ModelConfig,
  OptimizerConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.models.transformer import split_routing
from deltajax.routing.variants import VARIANTS
from deltajax.training.step import Trainer
from tests.helpers import quick_jit, random_params


def trainer(
  variant="delta_block", num_layers=2, freeze="none", gate="none", **training
):
  return Trainer(
    RunConfig(
      freeze=freeze,
      model=ModelConfig(
        vocab_size=31,
        width=16,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_width=16,
        dtype="float32",
        routing=RoutingConfig(variant=variant, num_blocks=2, gate=gate),
      ),
      optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
      training=TrainingConfig(steps=100, **{"batch_size": 4, **training}),
    )
  )


def batch(counted=(8, 8, 8, 8), length=8):
  """Rows whose first `counted` targets count; the rest is padding."""
  rng = np.random.default_rng(0)
  shape = (len(counted), length + 1)
  position = np.broadcast_to(np.arange(length + 1), shape)
  segments = position <= np.array(counted)[:, None]
  return {
    "tokens": rng.integers(0, 31, shape).astype(np.int32),
    "segment_ids": segments.astype(np.int32),
    "positions": position.astype(np.int32),
  }


@pytest.mark.smoke
def test_accumulation_equals_the_big_batch_with_unequal_counts():
  rows = batch(counted=(1, 0, 7, 8))
  big = trainer()
  state = jax.jit(big.init)()
  expected, expected_metrics = jax.jit(big.update)(state, rows)
  for count in (2, 4):
    small = trainer(accumulation=count)
    new, metrics = jax.jit(small.update)(state, rows)
    assert metrics["train/tokens"] == 16
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-5)
    # Adam's first update is lr * sign(gradient) nearly everywhere, so that
    # comparing moments is what compares gradients.
    chex.assert_trees_all_close(
      new.opt_state, expected.opt_state, rtol=1e-4, atol=1e-7
    )


def test_loss_is_per_token_of_the_whole_batch():
  rows = batch(counted=(1, 8, 3, 8))
  t = trainer()
  state = jax.jit(t.init)()
  sums = jax.jit(t.loss)(state.params, rows)
  _, metrics = jax.jit(t.update)(state, rows)
  np.testing.assert_allclose(metrics["train/loss"], sums.loss / 20, rtol=1e-6)


def test_padding_has_no_say():
  rows = batch(counted=(3, 8, 5, 8))
  other = dict(rows)
  other["tokens"] = np.where(
    rows["segment_ids"] == 0, (rows["tokens"] + 1) % 31, rows["tokens"]
  )
  t = trainer()
  state = jax.jit(t.init)()
  update = jax.jit(t.update)
  chex.assert_trees_all_equal(update(state, rows)[0], update(state, other)[0])


def test_every_parameter_moves_and_stays_float32():
  t = trainer("rd_attnres")
  state = jax.jit(t.init)()
  update = jax.jit(t.update)
  new = state
  for _ in range(3):
    new, _ = update(new, batch())
  moved = jax.tree.map(
    lambda a, b: bool(jnp.all(jnp.any(a != b))), state.params, new.params
  )
  assert all(jax.tree.leaves(moved)), moved
  chex.assert_tree_all_finite(new.params)
  assert {x.dtype for x in jax.tree.leaves(new.params)} == {np.dtype("float32")}
  assert new.step == 3


def test_z_loss_is_added_by_its_weight():
  rows = batch()
  plain, with_z = trainer(), trainer(z_loss=0.5)
  state = jax.jit(plain.init)()
  a = jax.jit(plain.update)(state, rows)[1]
  b = jax.jit(with_z.update)(state, rows)[1]
  assert a["train/loss"] == b["train/loss"]
  assert a["train/grad_norm"] != b["train/grad_norm"]


def test_variants_start_from_the_same_shared_parameters():
  reference = jax.jit(trainer("standard").init)().params
  for variant in VARIANTS:
    params = jax.jit(trainer(variant).init)().params
    params["layers"] = {
      name: x for name, x in params["layers"].items() if "router" not in name
    }
    params.pop("final_router", None)
    chex.assert_trees_all_equal(params, reference)


def test_the_program_of_an_update_does_not_grow_with_depth():
  def program(num_layers):
    t = trainer(num_layers=num_layers)
    text = t.jit_update().lower(t.abstract_state(), batch()).as_text()
    return len(text.splitlines())

  assert program(24) == pytest.approx(program(4), rel=0.01)


@pytest.mark.parametrize(
  ("variant", "gate"),
  [("rd_delta_block", "scalar"), ("attnres_full", "none")],
)
def test_a_frozen_base_stays_and_has_no_moments(variant, gate):
  every = trainer(variant, gate=gate)
  frozen = trainer(variant, gate=gate, freeze="base")
  params = random_params(frozen.config.model)
  rows = batch()
  state = quick_jit(frozen.start)(params)
  new, metrics = quick_jit(frozen.update)(state, rows)
  base, routing = split_routing(params)
  new_base, new_routing = split_routing(new.params)
  chex.assert_trees_all_equal(new_base, base)
  moved = jax.tree.map(lambda x, y: bool((x != y).any()), new_routing, routing)
  assert all(jax.tree.leaves(moved)), moved
  moments = optax.tree.get(new.opt_state, "mu")
  chex.assert_trees_all_equal_shapes(moments, routing)
  other, other_metrics = quick_jit(every.update)(
    quick_jit(every.start)(params), rows
  )
  np.testing.assert_array_equal(
    metrics["train/loss"], other_metrics["train/loss"]
  )
  expected = split_routing(optax.tree.get(other.opt_state, "mu"))[1]
  ratio = optax.tree.norm(expected) / optax.tree.norm(moments)
  # The same gradient; clipping sees less of it.
  chex.assert_trees_all_close(
    jax.tree.map(lambda x: x * ratio, moments), expected, rtol=1e-4, atol=1e-7
  )


def test_a_frozen_base_costs_no_memory_for_its_gradient():
  sizes = {}
  for freeze in ("none", "base"):
    each = trainer(num_layers=8, freeze=freeze)
    memory = (
      each.jit_update()
      .lower(each.abstract_state(), batch())
      .compile()
      .memory_analysis()
    )
    sizes[freeze] = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  count = count_parameters(trainer(num_layers=8).abstract_state().params)
  base = 4 * (count.total - count.routing)
  assert sizes["none"][0] - sizes["base"][0] == 2 * base
  assert sizes["none"][1] - sizes["base"][1] >= base
