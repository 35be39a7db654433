"""Parameter names: ours, and those of Hugging Face and released checkpoints.

One table maps both ways. The plain names are those of Qwen3 and Llama; the
routing names those of the authors' released Delta Attention Residuals code.
Hugging Face stores a linear map as [out, in], one tensor per layer; we store
[in..., out...] with layers stacked on axis 0.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from flax import linen as nn, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from deltajax.config import ModelConfig
from deltajax.models.transformer import is_routing, TransformerLM

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Name:
  """One row of the table.

  Attributes:
    external: the other side's name; `{layer}` stands for the layer's number.
    inputs: of a linear map, how many leading axes of our kernel are summed
      over, 0 for its bias. None for everything that is stored as it is.
  """

  external: str
  inputs: int | None = None


@dataclasses.dataclass(frozen=True)
class Place:
  """Where the tensor of one external name lies in our parameters.

  Attributes:
    path: of the parameter.
    layer: which of its stacked layers; None for one that is not stacked.
    shape: in our layout, without the layers.
    inputs: as of `Name`.
  """

  path: Path
  layer: int | None
  shape: Shape
  inputs: int | None

  @property
  def external_shape(self) -> Shape:
    """The other side's shape."""
    if self.inputs is None:
      return self.shape
    inputs, outputs = self.shape[: self.inputs], self.shape[self.inputs :]
    flat = (math.prod(outputs), math.prod(inputs))
    return flat if self.inputs else flat[:1]

  def to_internal(self, x: np.ndarray) -> np.ndarray:
    """The other side's tensor in our layout, as a view."""
    return (x.T if self.inputs else x).reshape(self.shape)

  def to_external(self, x: np.ndarray) -> np.ndarray:
    """Inverse of `to_internal`."""
    shape = self.external_shape
    return x.reshape(shape[::-1]).T if self.inputs else x.reshape(shape)

  def read(self, params: Mapping[str, Any]) -> np.ndarray:
    """The tensor of unboxed parameters, in the other side's layout."""
    leaf: Any = params
    for key in self.path:
      leaf = leaf[key]
    return self.to_external(
      np.asarray(leaf if self.layer is None else leaf[self.layer])
    )


_LAYER = "model.layers.{layer}."
_LINEAR_MAPS: Mapping[Path, Name] = {
  ("attention", "query"): Name("self_attn.q_proj", 1),
  ("attention", "key"): Name("self_attn.k_proj", 1),
  ("attention", "value"): Name("self_attn.v_proj", 1),
  ("attention", "output"): Name("self_attn.o_proj", 2),
  ("mlp", "gate"): Name("mlp.gate_proj", 1),
  ("mlp", "up"): Name("mlp.up_proj", 1),
  ("mlp", "down"): Name("mlp.down_proj", 1),
}
_NORMS: Mapping[Path, str] = {
  ("attention_norm",): "input_layernorm",
  ("mlp_norm",): "post_attention_layernorm",
  ("attention", "query_norm"): "self_attn.q_norm",
  ("attention", "key_norm"): "self_attn.k_norm",
}
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
  gate = config.routing.gate_name
  layers: dict[Path, Name] = {}
  for path, name in _LINEAR_MAPS.items():
    external = _LAYER + name.external
    layers[*path, "kernel"] = Name(f"{external}.weight", name.inputs)
    layers[*path, "bias"] = Name(f"{external}.bias", 0)
  for path, norm in _NORMS.items():
    layers[*path, "scale"] = Name(f"{_LAYER}{norm}.weight")
  layers |= _router_names(("attention_router",), _LAYER + "attn", gate)
  layers |= _router_names(("mlp_router",), _LAYER + "mlp", gate)
  return {
    ("embedding",): Name("model.embed_tokens.weight"),
    ("head",): Name("lm_head.weight", 1),
    ("final_norm", "scale"): Name("model.norm.weight"),
    **_router_names(("final_router",), "model.final", gate),
    **{("layers", *path): name for path, name in layers.items()},
  }


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
  """The parameter tree of a model as ShapeDtypeStructs; nothing is computed."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  variables = jax.eval_shape(
    TransformerLM(config).init, jax.random.key(0), tokens
  )
  return nn.meta.unbox(variables)["params"]


def tensor_places(config: ModelConfig) -> dict[str, Place]:
  """External name -> place, for every tensor of a model."""
  table = name_table(config)
  places: dict[str, Place] = {}
  for key_path, leaf in jax.tree_util.tree_leaves_with_path(
    parameter_shapes(config)
  ):
    path = tuple(key.key for key in key_path)
    name = table[path]
    if "{layer}" not in name.external:
      places[name.external] = Place(path, None, leaf.shape, name.inputs)
      continue
    for layer in range(config.num_layers):
      external = name.external.format(layer=layer)
      places[external] = Place(path, layer, leaf.shape[1:], name.inputs)
  return places


@dataclasses.dataclass(frozen=True)
class ParameterCount:
  """How many parameters a model has.

  Attributes:
    total: all of them.
    routing: those that route over depth.
  """

  total: int
  routing: int

  def __str__(self) -> str:
    share = self.routing / self.total
    return (
      f"{self.total:,} parameters, {self.routing:,} of them routing"
      f" ({share:.2%})"
    )


def count_parameters(params: Mapping[str, Any]) -> ParameterCount:
  """Counts unboxed parameters, or their ShapeDtypeStructs."""
  flat = traverse_util.flatten_dict(params)
  sizes = {path: math.prod(x.shape) for path, x in flat.items()}
  return ParameterCount(
    total=sum(sizes.values()),
    routing=sum(size for path, size in sizes.items() if is_routing(path)),
  )
