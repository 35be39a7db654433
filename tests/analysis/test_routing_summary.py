from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltajax
from deltajax.analysis.routing_summary import (
  routing_table,
  summarize_routing,
)


def summaries(variant, query_init_std=0.0, **routing):
  config = deltajax.ModelConfig(
    vocab_size=23,
    width=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    dtype="float32",
    routing=deltajax.RoutingConfig(
      variant=variant,
      num_blocks=2,
      query_init_std=query_init_std,
      **routing,
    ),
  )
  model = deltajax.TransformerLM(config)
  tokens = jnp.arange(20).reshape(2, 10)
  variables = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), tokens))
  return summarize_routing(model, variables["params"], tokens)


def test_zero_queries_are_uniform_over_the_sources_of_the_schedule():
  reads = summaries("attnres_block")
  schedule = deltajax.build_schedule(
    deltajax.RoutingConfig(variant="attnres_block", num_blocks=2), 4
  )
  expected = [schedule.sources(s) for s in [*range(8), None]]
  assert [list(read.sources) for read in reads] == expected
  for read in reads:
    np.testing.assert_allclose(read.mean_max_weight, read.uniform, rtol=1e-6)
    np.testing.assert_allclose(read.mean_weights, read.uniform, rtol=1e-6)
  assert reads[-1].name == "final"


def test_queries_sharpen_and_weights_sum_to_one():
  reads = summaries("delta", query_init_std=2.0, heads=2)
  assert len(reads) == 7  # the first sublayer sees nothing
  for read in reads:
    np.testing.assert_allclose(sum(read.mean_weights), 1, rtol=1e-5)
    assert read.mean_max_weight >= read.uniform - 1e-6
  assert reads[-1].mean_max_weight > 1.5 * reads[-1].uniform


def test_roles_and_null_sources_have_their_rows():
  reads = summaries("rd_delta_block", null_source=True)
  assert [(read.name, read.role) for read in reads[:4]] == [
    ("layer 0 attention", "Q/K"),
    ("layer 0 attention", "V"),
    ("layer 0 mlp", ""),
    ("layer 1 attention", "Q/K"),
  ]
  assert reads[0].sources == ("null",)
  assert reads[2].sources == ("null", "e", "b1+")


def test_standard_has_nothing_to_summarise():
  assert summaries("standard") == []


def test_table_shows_maximum_beside_uniform():
  lines = routing_table(summaries("delta_block")).splitlines()
  assert lines[0].split() == ["read", "sources", "max", "uniform", "favourite"]
  assert lines[1].startswith("layer 0 mlp")
  assert lines[1].split()[3:6] == ["2", "0.500", "0.500"]


@pytest.mark.smoke
def test_summary_of_the_released_recurrence():
  reads = summaries("delta_block_released")
  assert reads[0].name == "layer 0 mlp"
  assert reads[-1].sources == ("e", "r1")
