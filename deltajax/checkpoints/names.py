"""Parameter names: ours, and those of Hugging Face and released checkpoints.

One table maps both ways. The plain names are those of Qwen3 and Llama; the
routing names those of the authors' released Delta Attention Residuals code.
Hugging Face stores a linear map as [out, in], one tensor per layer; we store
[in..., out...] with layers stacked on axis 0.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from deltajax.config import ConfigError, ModelConfig
from deltajax.models.transformer import TransformerLM

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Name:
  """One row of the table.

  Attributes:
    external: the other side's name; `{layer}` stands for the layer's number.
    input_axes: leading axes of our kernel that are summed over, if it is a
      linear map; 0 for everything else, which is stored as it is.
  """

  external: str
  input_axes: int = 0

  def to_external(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Our tensor (of one layer) in the other layout."""
    if not self.input_axes:
      return x.reshape(shape)
    return x.reshape(shape[::-1]).T

  def to_internal(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The other side's tensor in our layout."""
    return (x.T if self.input_axes else x).reshape(shape)

  def external_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape on the other side of a tensor that has `shape` here."""
    if not self.input_axes:
      return shape
    inputs, outputs = shape[: self.input_axes], shape[self.input_axes :]
    return (int(np.prod(outputs)), int(np.prod(inputs)))


_LAYER = "model.layers.{layer}."
_GATE_SUFFIX = {"none": "", "scalar": "alpha", "sigmoid": "gate_logit"}


def _router_names(router: Path, prefix: str, gate: str) -> dict[Path, Name]:
  return {
    (*router, "query"): Name(f"{prefix}_res_proj.weight"),
    (*router, "key_norm"): Name(f"{prefix}_res_norm.weight"),
    (*router, "null_source"): Name(f"{prefix}_null_source"),
    (*router, "gate"): Name(f"{prefix}_res_{_GATE_SUFFIX[gate]}"),
  }


def name_table(config: ModelConfig) -> dict[Path, Name]:
  """Our parameter paths -> names, for every parameter that may exist."""
  attention = _LAYER + "self_attn."
  gate = config.routing.gate
  gate = config.routing.row.gate if gate == "none" else gate
  return {
    ("embedding",): Name("model.embed_tokens.weight"),
    ("head",): Name("lm_head.weight", 1),
    ("final_norm", "scale"): Name("model.norm.weight"),
    ("layers", "attention_norm", "scale"): Name(
      _LAYER + "input_layernorm.weight"
    ),
    ("layers", "mlp_norm", "scale"): Name(
      _LAYER + "post_attention_layernorm.weight"
    ),
    ("layers", "attention", "query", "kernel"): Name(
      attention + "q_proj.weight", 1
    ),
    ("layers", "attention", "key", "kernel"): Name(
      attention + "k_proj.weight", 1
    ),
    ("layers", "attention", "value", "kernel"): Name(
      attention + "v_proj.weight", 1
    ),
    ("layers", "attention", "output", "kernel"): Name(
      attention + "o_proj.weight", 2
    ),
    ("layers", "attention", "query_norm", "scale"): Name(
      attention + "q_norm.weight"
    ),
    ("layers", "attention", "key_norm", "scale"): Name(
      attention + "k_norm.weight"
    ),
    ("layers", "mlp", "gate", "kernel"): Name(
      _LAYER + "mlp.gate_proj.weight", 1
    ),
    ("layers", "mlp", "up", "kernel"): Name(_LAYER + "mlp.up_proj.weight", 1),
    ("layers", "mlp", "down", "kernel"): Name(
      _LAYER + "mlp.down_proj.weight", 1
    ),
    **_router_names(("layers", "attention_router"), _LAYER + "attn", gate),
    **_router_names(("layers", "mlp_router"), _LAYER + "mlp", gate),
    **_router_names(("final_router",), "model.final", gate),
  }


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
  """The parameter tree of a model as ShapeDtypeStructs; nothing is computed."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  variables = jax.eval_shape(
    TransformerLM(config).init, jax.random.key(0), tokens
  )
  return nn.meta.unbox(variables)["params"]


def params_from_tensors(
  config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Builds parameters from tensors under their external names.

  Args:
    config: of the model.
    tensors: external name -> array.

  Returns:
    Our parameter tree, in the dtypes of `tensors`.

  Raises:
    ConfigError: lists every missing, unexpected and misshapen tensor at once.
  """
  table = name_table(config)
  shapes = parameter_shapes(config)
  problems: list[str] = []
  used: set[str] = set()

  def read(external: str, name: Name, shape: tuple[int, ...]):
    used.add(external)
    if external not in tensors:
      problems.append(f"missing: {external}")
      return None
    expected = name.external_shape(shape)
    found = tensors[external].shape
    if found != expected:
      problems.append(f"{external} has shape {found}, expected {expected}")
      return None
    return name.to_internal(tensors[external], shape)

  def build(key_path, struct):
    path = tuple(key.key for key in key_path)
    name = table[path]
    if "{layer}" not in name.external:
      return read(name.external, name, struct.shape)
    layers = [
      read(name.external.format(layer=layer), name, struct.shape[1:])
      for layer in range(config.num_layers)
    ]
    return None if any(x is None for x in layers) else np.stack(layers)

  params = jax.tree_util.tree_map_with_path(build, shapes)
  problems += [f"unexpected: {name}" for name in sorted(set(tensors) - used)]
  if problems:
    raise ConfigError(
      "the tensors do not fit the model:\n  " + "\n  ".join(problems)
    )
  return params


def tensors_from_params(
  config: ModelConfig, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Inverse of `params_from_tensors` (of unboxed parameters)."""
  table = name_table(config)
  tensors: dict[str, np.ndarray] = {}
  for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = table[tuple(key.key for key in key_path)]
    array = np.asarray(leaf)
    if "{layer}" not in name.external:
      shape = name.external_shape(array.shape)
      tensors[name.external] = name.to_external(array, shape)
      continue
    shape = name.external_shape(array.shape[1:])
    for layer, x in enumerate(array):
      tensors[name.external.format(layer=layer)] = name.to_external(x, shape)
  return tensors
