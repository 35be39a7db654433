"""Model sizes by name: `presets["delta_block-220m"]`, `presets["qwen3-8b"]`.

The sizes of the Delta (220m, 533m, 1044m, 7.6b) and Role-Decoupled papers
(120m, 343m) exist for every variant, as `VARIANT-SIZE`. Qwen3 (qwen3-0.6b,
-1.7b, -4b, -8b, -14b, -32b) and SmolLM2 (smollm2-135m, -360m) are `standard`,
as their checkpoints are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from deltajax.config import ModelConfig, RoutingConfig
from deltajax.routing.validation import ConfigError, unknown_name
from deltajax.routing.variants import VARIANTS

_QWEN3: dict[str, Any] = {
  "vocab_size": 151_936,
  "rope_theta": 1e6,
  "norm_eps": 1e-6,
}
_SMOLLM2: dict[str, Any] = {
  "vocab_size": 49_152,
  "rope_theta": 1e5,
  "norm_eps": 1e-5,
  "qk_norm": False,
}
# The shapes behind the counts of arXiv 2608.01075 are not published. These are
# inferred: vocabulary 32,768, tied, heads of 64, no grouping, mlp of 5 widths.
_RD: dict[str, Any] = {
  "vocab_size": 32_768,
  "rope_theta": 1e6,
  "norm_eps": 1e-6,
}


def _shape(
  layers: int,
  width: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  mlp_width: int,
) -> dict[str, Any]:
  return {
    "num_layers": layers,
    "width": width,
    "num_heads": heads,
    "num_kv_heads": kv_heads,
    "head_dim": head_dim,
    "mlp_width": mlp_width,
  }


# Sizes that exist for every variant. Blocks as published for 7.6B: 4.
_PAPER_SIZES = {
  "220m": _QWEN3 | _shape(12, 768, 12, 4, 64, 3072),
  "533m": _QWEN3 | _shape(24, 1024, 16, 8, 64, 4096),
  "1044m": _QWEN3 | _shape(36, 1280, 20, 4, 64, 5120),
  "7.6b": _QWEN3 | _shape(36, 4096, 32, 8, 128, 12_288),
  "120m": _RD | _shape(16, 576, 9, 9, 64, 2880),
  "343m": _RD | _shape(24, 832, 13, 13, 64, 4160),
}
_UNTIED = {"tie_embeddings": False}
_CHECKPOINT_SIZES = {
  "qwen3-0.6b": _QWEN3 | _shape(28, 1024, 16, 8, 128, 3072),
  "qwen3-1.7b": _QWEN3 | _shape(28, 2048, 16, 8, 128, 6144),
  "qwen3-4b": _QWEN3 | _shape(36, 2560, 32, 8, 128, 9728),
  "qwen3-8b": _QWEN3 | _UNTIED | _shape(36, 4096, 32, 8, 128, 12_288),
  "qwen3-14b": _QWEN3 | _UNTIED | _shape(40, 5120, 40, 8, 128, 17_408),
  "qwen3-32b": _QWEN3 | _UNTIED | _shape(64, 5120, 64, 8, 128, 25_600),
  "smollm2-135m": _SMOLLM2 | _shape(30, 576, 9, 3, 64, 1536),
  "smollm2-360m": _SMOLLM2 | _shape(32, 960, 15, 5, 64, 2560),
}


class UnknownPresetError(ConfigError, KeyError):
  """There is no preset of that name."""

  def __str__(self) -> str:
    return self.args[0]  # KeyError would show the message's repr.


class Presets(Mapping[str, ModelConfig]):
  """Model configs by name.

  Raises:
    ConfigError: (a KeyError too) for an unknown name; it names the nearest.

  Examples:
    >>> config = presets["delta_block-220m"]
    >>> config.num_layers, config.width, config.routing.variant
    (12, 768, 'delta_block')
  """

  def __init__(self) -> None:
    routed = {
      f"{variant}-{size}": (variant, shape)
      for variant in VARIANTS
      for size, shape in _PAPER_SIZES.items()
    }
    fixed = {
      name: ("standard", shape) for name, shape in _CHECKPOINT_SIZES.items()
    }
    self._rows = routed | fixed

  def __getitem__(self, name: str) -> ModelConfig:
    if name not in self._rows:
      raise UnknownPresetError(unknown_name("preset", name, self._rows))
    variant, shape = self._rows[name]
    return ModelConfig(routing=RoutingConfig(variant=variant), **shape)

  def __iter__(self) -> Iterator[str]:
    return iter(self._rows)

  def __len__(self) -> int:
    return len(self._rows)


presets = Presets()
