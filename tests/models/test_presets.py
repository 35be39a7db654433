import math

import jax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.models.presets import presets
from deltajax.routing.validation import ConfigError
from deltajax.routing.variants import VARIANTS


def count(name):
  shapes = parameter_shapes(presets[name])
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


# Published counts, in millions.
@pytest.mark.parametrize(
  ("name", "millions"),
  [
    ("standard-220m", 220.5),
    ("standard-533m", 533.1),
    ("standard-1044m", 1043.9),
    ("standard-7.6b", 7568.4),
    ("smollm2-135m", 134.5),
    ("smollm2-360m", 361.8),
    ("qwen3-0.6b", 596.0),
    ("qwen3-1.7b", 1720.6),
    ("qwen3-4b", 4022.5),
    ("qwen3-8b", 8190.7),
    ("qwen3-14b", 14768.3),
    ("qwen3-32b", 32762.1),
  ],
)
def test_published_sizes(name, millions):
  assert round(count(name) / 1e6, 1) == millions


# These are cut, not rounded: 119.755 and 342.961 million.
@pytest.mark.parametrize(
  ("name", "millions"), [("standard-120m", 119.7), ("standard-343m", 342.9)]
)
def test_inferred_sizes_of_the_role_decoupled_paper(name, millions):
  assert math.floor(count(name) / 1e5) / 10 == millions


@pytest.mark.smoke
def test_routing_parameters_of_delta_block_at_7b():
  assert count("delta_block-7.6b") - count("standard-7.6b") == 589_824


def test_every_variant_has_every_paper_size():
  sizes = ("220m", "533m", "1044m", "7.6b", "120m", "343m")
  assert {f"{v}-{s}" for v in VARIANTS for s in sizes} <= set(presets)
  for name in presets:
    assert presets[name].num_layers > 0
  assert presets["delta-7.6b"].routing.variant == "delta"


def test_qwen3_head_dim_is_not_width_over_heads():
  config = presets["qwen3-0.6b"]
  assert config.head_dim == 128
  assert config.width // config.num_heads == 64
  shapes = parameter_shapes(presets["qwen3-4b"])
  query = shapes["layers"]["attention"]["query"]["kernel"]
  assert query.shape == (36, 2560, 32, 128)


def test_unknown_preset_names_the_nearest():
  with pytest.raises(ConfigError, match=r"did you mean 'qwen3-0\.6b'"):
    presets["qwen3-06b"]
  with pytest.raises(KeyError):
    presets["nothing like it"]
  assert presets.get("nothing like it") is None
