"""Whole models equal the NumPy oracle in float64, read by read."""

import numpy as np
import pytest

from deltajax.routing import VARIANTS
from tests.helpers import (
  logits_of,
  random_params,
  random_tokens,
  relative_error,
  tiny_config,
)
from tests.routing import oracle

# Options that reach every line of a read, on variants unlike each other.
OPTIONS = {
  "heads": ("attnres_block", {"heads": 2}),
  "heads_roles": ("rd_delta_block", {"heads": 4}),
  "key_dim": ("delta_block_released", {"key_dim": 6}),
  "key_dim_roles": ("rd_attnres", {"key_dim": 5}),
  "key_dim_heads": ("delta_replace", {"key_dim": 8, "heads": 4}),
  "null_replace": ("attnres_block", {"null_source": True}),
  "null_first_read": ("delta", {"null_source": True}),
  "null_heads_key_dim": (
    "full_additive",
    {"null_source": True, "heads": 2, "key_dim": 6},
  ),
  "scalar": ("delta_block_released", {"gate": "scalar"}),
  "scalar_skip": ("embedding_skip", {"gate": "scalar"}),
  "sigmoid": ("full_additive", {"gate": "sigmoid"}),
  "sigmoid_skip": ("embedding_skip_scaled", {"gate": "sigmoid"}),
  "all_roles": (
    "rd_delta_block",
    {"null_source": True, "heads": 2, "key_dim": 4, "gate": "scalar"},
  ),
  "all_released": (
    "delta_block_released",
    {"null_source": True, "heads": 2, "key_dim": 12, "gate": "sigmoid"},
  ),
  "null_average_uneven": (
    "rd_average",
    {"null_source": True, "heads": 2, "num_layers": 5},
  ),
  "null_frozen": ("rd_frozen_v", {"null_source": True, "key_dim": 7}),
  "reference": ("rd_delta_block", {"depth_attention": "reference"}),
  "uneven": ("delta_block_released", {"num_layers": 5}),
  "one_layer_blocks": ("attnres_block", {"num_blocks": 4}),
  "untied_llama": (
    "delta_block",
    {"tie_embeddings": False, "qk_norm": False, "rope_theta": 100.0},
  ),
  "multi_query": (
    "standard",
    {"num_kv_heads": 1, "head_dim": 6, "norm_eps": 0.1},
  ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_oracle(variant):
  check(tiny_config(variant))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_oracle(name):
  variant, options = OPTIONS[name]
  check(tiny_config(variant, **{"num_layers": 4, "num_blocks": 2, **options}))


@pytest.mark.parametrize("variant", ["delta_block", "rd_attnres"])
def test_packed_documents_equal_the_oracle(variant):
  segment_ids = np.array(
    [[1, 1, 1, 1, 2, 2, 2, 3, 3], [5, 7, 7, 7, 7, 7, 7, 7, 0]]
  )
  positions = np.array(
    [[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6, 0]]
  )
  check(tiny_config(variant), segment_ids, positions)


def check(config, segment_ids=None, positions=None):
  params = random_params(config)
  tokens = random_tokens(config)
  expected = oracle.model_logits(config, params, tokens, segment_ids, positions)
  logits = logits_of(config, params, tokens, segment_ids, positions)
  assert logits.dtype == np.float64
  assert relative_error(logits, expected) < 1e-10
