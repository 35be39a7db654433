"""config.json of a model directory: which model it describes, and back.

Three dialects, by `model_type`: `llama` and `qwen3` are Hugging Face's own,
`qwen3_attnres` is that of the authors' released Delta Attention Residuals code,
and `deltajax` holds our config, which can say everything. The tensors beside it
have the same names in all of them.
"""

from collections.abc import Mapping
import json
import pathlib
import types
from typing import Any

from deltajax.config import (
  ConfigError,
  from_dict,
  ModelConfig,
  RopeScaling,
  RoutingConfig,
  to_dict,
)
from deltajax.routing.validation import check_name

NAME = "config.json"
OWN = "deltajax"
RELEASED = "qwen3_attnres"
MODEL_TYPES = ("llama", "qwen3", RELEASED, OWN)

# What the classes of transformers take where a file says nothing. None for
# heads of keys: as many as of queries; for head_dim: width / heads.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
  {
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
  }
)
# Our field -> their key, where the value is the same.
_FIELDS: Mapping[str, str] = types.MappingProxyType(
  {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "init_std": "initializer_range",
  }
)
_OPTIONAL: Mapping[str, Any] = types.MappingProxyType(
  {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
  }
)
# Keys that would make another model of it, and the values that do not.
_ONLY: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
  {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
  }
)
# Routing, as the released code calls it; its other modes and gates are not
# here. `bias` is its word for no gate.
_MODES: Mapping[str, str] = types.MappingProxyType(
  {
    "block": "attnres_block",
    "full": "attnres_full",
    "delta": "delta",
    "delta_block": "delta_block_released",
    "full_additive": "full_additive",
    "delta_replace": "delta_replace",
  }
)
_GATES: Mapping[str, str] = types.MappingProxyType(
  {"bias": "none", "learnable_alpha": "scalar", "sigmoid_scalar": "sigmoid"}
)
# Not part of a model, but wanted by whoever uses it.
CARRIED = (
  "bos_token_id",
  "eos_token_id",
  "pad_token_id",
  "max_position_embeddings",
)
# Fields of RopeScaling -> their keys.
_ROPE: Mapping[str, str] = types.MappingProxyType(
  {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
  }
)


def is_model_directory(directory: pathlib.Path) -> bool:
  """Whether a directory's config.json names a model_type, known or not."""
  try:
    return "model_type" in json.loads((directory / NAME).read_text())
  except (OSError, ValueError, TypeError):
    return False


def read_json(directory: pathlib.Path) -> dict[str, Any]:
  """What config.json says.

  Raises:
    ConfigError: if there is none, or it describes no model that is known here.
  """
  path = directory / NAME
  if not directory.is_dir():
    raise ConfigError(f"there is no directory {directory}.")
  if not path.is_file():
    raise ConfigError(f"{directory} is no model directory: it has no {NAME}.")
  try:
    values = json.loads(path.read_text())
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path} is not JSON: {error}.") from None
  if not isinstance(values, dict) or "model_type" not in values:
    raise ConfigError(f"{path} has no model_type, so it describes no model.")
  check_name(f"model_type in {path}", values["model_type"], MODEL_TYPES)
  return values


def model_config(values: Mapping[str, Any]) -> ModelConfig:
  """The model that a config.json describes.

  Raises:
    ConfigError: if it asks for something that is not here, or says too little.
  """
  if values.get("max_position_embeddings") is not None:
    _check_count(values, "max_position_embeddings")
  if values["model_type"] == OWN:
    return _own_config(values)
  for key, valid in _ONLY.items():
    if values.get(key, valid[0]) not in valid:
      raise ConfigError(
        f"{NAME} has {key} {values[key]!r}; only {valid[0]!r} is supported."
      )
  kinds = values.get("layer_types") or []
  kinds = kinds if isinstance(kinds, list) else [kinds]
  others = sorted({str(kind) for kind in kinds} - {"full_attention"})
  if others:
    raise ConfigError(
      f"{NAME} has layer_types {', '.join(others)}; only full_attention is"
      " supported."
    )
  family = "llama" if values["model_type"] == "llama" else "qwen3"
  known = {**_OPTIONAL, **_DEFAULTS[family], **values}
  missing = sorted(key for key in _FIELDS.values() if key not in known)
  if missing:
    raise ConfigError(f"{NAME} lacks {', '.join(missing)}.")
  for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
    _check_count(known, key)
  fields = {field: known[key] for field, key in _FIELDS.items()}
  if fields["num_kv_heads"] is None:
    fields["num_kv_heads"] = fields["num_heads"]
  if fields["head_dim"] is None:
    fields["head_dim"] = fields["width"] // fields["num_heads"]
  theta, scaling = _read_rope(values)
  routing = RoutingConfig(variant="standard")
  if values["model_type"] == RELEASED:
    routing = _released_routing(values, fields["num_layers"])
  return ModelConfig(
    **fields,
    qk_norm=family == "qwen3",
    rope_theta=theta,
    rope_scaling=scaling,
    routing=routing,
  )


def config_values(config: ModelConfig, dtype: str, own: bool) -> dict[str, Any]:
  """A config.json for a model.

  Args:
    config: of the model.
    dtype: of the tensors beside it.
    own: in our dialect. Otherwise in Hugging Face's, or in that of the released
      code for a model that is routed.

  Raises:
    ConfigError: if the dialect cannot express the model, with the reason.
  """
  if own:
    return {"model_type": OWN, "torch_dtype": dtype, "model": to_dict(config)}
  reason = unexpressible(config)
  if reason is not None:
    raise ConfigError(
      f"this model cannot be written for other programs: {reason}. Write it in"
      " deltajax's own layout (layout 'deltajax'), which can hold every model."
    )
  family = "qwen3" if config.qk_norm else "llama"
  architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
  values: dict[str, Any] = {
    "architectures": [architecture[family]],
    "model_type": family,
    "torch_dtype": dtype,
    "hidden_act": "silu",
    **{key: getattr(config, field) for field, key in _FIELDS.items()},
    **_rope_values(config),
  }
  if family == "qwen3":
    del values["mlp_bias"]
  routing = config.routing
  if routing.variant != "standard":
    values |= {
      "architectures": ["Qwen3AttnResForCausalLM"],
      "model_type": RELEASED,
      "attnres_mode": _reversed(_MODES)[routing.variant],
      "attnres_num_blocks": routing.num_blocks,
      "attnres_gate_type": _reversed(_GATES)[routing.gate],
      "attnres_use_null_source": routing.null_source,
    }
  return values


def unexpressible(config: ModelConfig) -> str | None:
  """Why no dialect but our own can express a model; None if one can."""
  routing = config.routing
  if config.qk_norm and config.mlp_bias:
    return "Qwen3 has no mlp_bias, and Llama no qk_norm"
  if routing.variant == "standard":
    if not config.qk_norm and config.width % config.num_heads:
      return (
        f"Llama wants a hidden_size that is divisible by the heads, not"
        f" {config.width} and {config.num_heads}"
      )
    return None
  if routing.variant not in _MODES.values():
    return (
      f"the released AttnRes code has no variant {routing.variant!r}, but"
      f" {', '.join(sorted(_MODES.values()))}"
    )
  if not config.qk_norm:
    return "the released AttnRes code is for Qwen3, whose qk_norm is on"
  for name, neutral in (("heads", 1), ("key_dim", None)):
    value = getattr(routing, name)
    if value != neutral:
      return f"the released AttnRes code has no routing.{name}, here {value}"
  if routing.null_source and not routing.row.additive:
    return (
      "the released AttnRes code reads null sources in additive variants alone,"
      f" and {routing.variant!r} is none"
    )
  return None


def _check_count(values: Mapping[str, Any], key: str) -> None:
  value = values[key]
  if not isinstance(value, int) or value < 1:
    raise ConfigError(f"{NAME} has {key} {value!r}; it must be at least 1.")


def _own_config(values: Mapping[str, Any]) -> ModelConfig:
  if not isinstance(values.get("model"), Mapping):
    raise ConfigError(f"{NAME} of model_type {OWN!r} lacks its model.")
  try:
    return from_dict(ModelConfig, values["model"])
  except ConfigError as error:
    raise ConfigError(f"{NAME}: {error}") from None


def _released_routing(
  values: Mapping[str, Any], num_layers: int
) -> RoutingConfig:
  missing = {"attnres_mode", "attnres_num_blocks"} - values.keys()
  if missing:
    raise ConfigError(f"{NAME} lacks {', '.join(sorted(missing))}.")
  _check_count(values, "attnres_num_blocks")
  gate = values.get("attnres_gate_type", "bias")
  check_name(f"attnres_mode in {NAME}", values["attnres_mode"], _MODES)
  check_name(f"attnres_gate_type in {NAME}", gate, _GATES)
  routing = RoutingConfig(
    variant=_MODES[values["attnres_mode"]],
    # There, more blocks than layers are as many as layers.
    num_blocks=min(values["attnres_num_blocks"], num_layers),
    gate=_GATES[gate],
    null_source=values.get("attnres_use_null_source", False),
  )
  if routing.null_source and not routing.row.additive:
    raise ConfigError(
      f"{NAME} has attnres_use_null_source with attnres_mode"
      f" {values['attnres_mode']!r}, where the released code has null sources"
      " but reads none; they would change the model here."
    )
  return routing


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling]:
  """Base and scaling, as transformers 4 or 5 writes them."""
  rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
  if not isinstance(rope, dict):
    raise ConfigError(f"the rope of {NAME} is {rope!r}, no mapping.")
  rope = dict(rope)
  theta = rope.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  check_name(f"rope type in {NAME}", kind, ("default", "llama3"))
  rope = {key: value for key, value in rope.items() if value is not None}
  if rope.pop("partial_rotary_factor", 1.0) != 1.0:
    raise ConfigError(
      f"{NAME} rotates a part of each head; only whole ones are supported."
    )
  keys = {} if kind == "default" else _ROPE
  if keys and values.get("max_position_embeddings") is not None:
    rope.setdefault(keys["original_length"], values["max_position_embeddings"])
  for message, names in (
    ("lacks", set(keys.values()) - rope.keys()),
    ("has, and nothing here reads,", rope.keys() - set(keys.values())),
  ):
    if names:
      raise ConfigError(
        f"the {kind} rope of {NAME} {message} {', '.join(sorted(names))}."
      )
  if kind == "default":
    return theta, RopeScaling()
  fields = {field: rope[key] for field, key in keys.items()}
  return theta, RopeScaling(kind=kind, **fields)


def _rope_values(config: ModelConfig) -> dict[str, Any]:
  """Both spellings: transformers 4 reads the first two, 5 the third."""
  scaling = None
  if config.rope_scaling.kind != "none":
    scaling = {"rope_type": config.rope_scaling.kind} | {
      key: getattr(config.rope_scaling, field) for field, key in _ROPE.items()
    }
  return {
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling,
    "rope_parameters": {"rope_type": "default"}
    | (scaling or {})
    | {"rope_theta": config.rope_theta},
  }


def _reversed(table: Mapping[str, str]) -> dict[str, str]:
  return {value: key for key, value in table.items()}
