"""Model directories: config.json, safetensors, and a tokenizer's files.

`load_pretrained` reads Qwen3 and Llama as transformers writes them, the layout
of the authors' released Delta Attention Residuals code, and our own.
`save_pretrained` writes any of them; see `config_json` for what each can say.
"""

from collections.abc import Mapping
import dataclasses
from functools import partial
import itertools
import json
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

from flax import linen as nn, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from deltajax.checkpoints import config_json
from deltajax.checkpoints.arrays import assemble
from deltajax.checkpoints.directory import (
  check_replaceable,
  replaced_directory,
)
from deltajax.checkpoints.names import (
  parameter_shapes,
  Path,
  Place,
  tensor_places,
)
from deltajax.checkpoints.tensor_files import (
  DTYPES,
  INDEX,
  TensorFiles,
  write_tensors,
)
from deltajax.config import ConfigError, ModelConfig, RoutingConfig
from deltajax.data import tokenizer_file
from deltajax.models.transformer import is_routing, TransformerLM
from deltajax.routing.validation import check_name

LAYOUTS = ("huggingface", "deltajax")
PARAM_DTYPES = ("float32", "bfloat16")
SHARD_BYTES = 5 * 10**9
COMPANIONS = (
  *(tokenizer_file.FILE_NAME, "tokenizer_config.json"),
  *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
  *("merges.txt", "tokenizer.model", "chat_template.jinja"),
  "generation_config.json",
)
# What old versions of transformers stored beside the parameters.
_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Pretrained(NamedTuple):
  """A model that was read.

  Attributes:
    config: of the model.
    params: its unboxed parameters.
  """

  config: ModelConfig
  params: dict[str, Any]


def load_config(
  directory: str | os.PathLike[str], routing: RoutingConfig | None = None
) -> ModelConfig:
  """The config that `load_pretrained` returns; reads no tensor.

  Raises:
    ConfigError: if the directory describes no model that is supported, or its
      tokenizer belongs to another, or it is routed already.
  """
  directory = pathlib.Path(directory)
  config = config_json.model_config(config_json.read_json(directory))
  check_tokenizer(directory, config)
  config = dataclasses.replace(config, param_dtype="float32")
  return config if routing is None else add_routing(config, routing)


def add_routing(config: ModelConfig, routing: RoutingConfig) -> ModelConfig:
  """The config of a standard model, with a routing.

  Raises:
    ConfigError: if the model has another routing already.
  """
  if config.routing.variant != "standard" and config.routing != routing:
    raise ConfigError(
      f"the model is routed already ({config.routing.variant}); only a standard"
      " one can be given a routing."
    )
  return dataclasses.replace(config, routing=routing)


def load_pretrained(
  directory: str | os.PathLike[str],
  routing: RoutingConfig | None = None,
  *,
  param_dtype: str | None = "float32",
  shardings: Any = None,
) -> Pretrained:
  """Reads a model, one tensor at a time.

  Args:
    directory: config.json and safetensors: Qwen3 or Llama of transformers 4 or
      5, the released AttnRes layout, or deltajax's own.
    routing: makes a `standard` model a routed one, with its routing parameters
      as they are initialised. With `gate="scalar"` every additive variant then
      computes the model that was read: bit for bit, but for how a compiler may
      round float32. None: as stored.
    param_dtype: `float32` or `bfloat16`. None: as stored, which is float32
      unless all tensors are bfloat16.
    shardings: a tree like the parameters of `jax.sharding.Sharding`s, or one
      for all; a host then reads and holds its own parts alone. None: all on
      JAX's default device. `load_config` gives the config to make them for.

  Returns:
    (config, params). `config.dtype` is that of a new ModelConfig: choose what
    to compute in with `dataclasses.replace`.

  Raises:
    ConfigError: if the model is not supported, is routed already, files are
      missing or incomplete, or tensors do not fit: all of them are named.

  Examples:
    >>> import tempfile
    >>> from deltajax import testing
    >>> routing = RoutingConfig(variant="delta", gate="scalar")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   _ = testing.write_model(directory, num_layers=2)
    ...   config, params = load_pretrained(directory, routing)
    >>> config.routing.variant, params["layers"]["mlp_router"]["gate"].tolist()
    ('delta', [0.0, 0.0])
  """
  directory = pathlib.Path(directory)
  if param_dtype is not None:
    check_name("param_dtype", param_dtype, PARAM_DTYPES)
  stored = load_config(directory)
  config = stored if routing is None else add_routing(stored, routing)
  by_path = dict.fromkeys(
    traverse_util.flatten_dict(parameter_shapes(config)), shardings
  )
  if isinstance(shardings, Mapping):
    given = traverse_util.flatten_dict(shardings)
    if given.keys() != by_path.keys():
      raise ConfigError(
        "shardings are not a tree like the parameters:"
        f" {sorted(given.keys() ^ by_path.keys())} are in one alone."
      )
    by_path = given
  with TensorFiles(directory) as files:
    places = check_tensors(stored, files, directory)
    if param_dtype is None:
      param_dtype = stored_dtype(files)
    params = _load(files, places, param_dtype, by_path)
  config = dataclasses.replace(config, param_dtype=param_dtype)
  if config.routing != stored.routing:
    params |= _initial_routing(config, by_path)
  return Pretrained(config, traverse_util.unflatten_dict(params))


def save_pretrained(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  params: Any,
  *,
  layout: str = "huggingface",
  like: str | os.PathLike[str] | None = None,
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a model directory, at once or not at all.

  Args:
    directory: is made, or replaced if it holds a model and nothing else.
    config: of the model.
    params: its unboxed parameters, all of them on this host's devices.
    layout: `huggingface` for other programs: Qwen3 or Llama for a `standard`
      model, the released AttnRes layout for a routed one. `deltajax` holds
      every model, for `load_pretrained`.
    like: a model directory whose tokenizer, token ids and context length are
      carried along.
    dtype: of the tensors; None: of the parameters.
    shard_bytes: largest size of a file.

  Raises:
    ConfigError: if the layout cannot hold the model, with the reason, or
      parameters do not fit the config, or the directory holds something else.

  Examples:
    >>> import tempfile
    >>> from deltajax import testing
    >>> config = testing.tiny_config("rd_delta", num_layers=2)
    >>> params = testing.random_params(config)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   save_pretrained(directory, config, params, layout="deltajax")
    ...   config == load_pretrained(directory).config
    True
  """
  check_save(directory, config, layout=layout, like=like, dtype=dtype)
  _check_params(config, params)
  if dtype is None:
    dtype = str(jnp.result_type(*jax.tree.leaves(params)))
  values = config_json.config_values(config, dtype, own=layout == "deltajax")
  companions: list[pathlib.Path] = []
  if like is not None:
    like = pathlib.Path(like)
    theirs = config_json.read_json(like)
    values |= {k: theirs[k] for k in config_json.CARRIED if k in theirs}
    companions = [like / name for name in COMPANIONS if (like / name).is_file()]
  places = tensor_places(config)
  with replaced_directory(pathlib.Path(directory), _is_ours) as temporary:
    text = json.dumps(values, indent=2) + "\n"
    (temporary / config_json.NAME).write_text(text)
    for file in companions:
      shutil.copyfile(file, temporary / file.name)
    write_tensors(
      temporary,
      {name: place.external_shape for name, place in places.items()},
      lambda name: places[name].read(params),
      dtype,
      shard_bytes,
    )


def check_save(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  *,
  layout: str = "huggingface",
  like: str | os.PathLike[str] | None = None,
  dtype: str | None = None,
) -> None:
  """Raises ConfigError where `save_pretrained` would, whatever the parameters.

  Args:
    directory: see `save_pretrained`, as for all others.
    config: of the model.
    layout: of the directory.
    like: a model directory.
    dtype: of the tensors.
  """
  check_name("layout", layout, LAYOUTS)
  if dtype is not None:
    check_name("dtype", dtype, DTYPES.values())
  config_json.config_values(config, "", own=layout == "deltajax")
  if like is not None:
    config_json.read_json(pathlib.Path(like))
    check_tokenizer(pathlib.Path(like), config)
  check_replaceable(pathlib.Path(directory), _is_ours)


def check_tensors(
  config: ModelConfig, files: TensorFiles, directory: pathlib.Path
) -> dict[str, Place]:
  """The places of a model's tensors, once they are known to fit.

  Raises:
    ConfigError: lists every missing, unexpected, duplicate and misshapen
      tensor at once.
  """
  places = tensor_places(config)
  found = {
    name: shape
    for name, shape in files.shapes.items()
    if not _BUFFER.fullmatch(name)
  }
  problems = list(files.problems)
  if config.tie_embeddings and {_HEAD, _EMBEDDING} <= found.keys():
    del found[_HEAD]
    if not _equal(files, _HEAD, _EMBEDDING):
      problems.append(
        f"{_HEAD} is not {_EMBEDDING}, but tie_word_embeddings is true"
      )
  for name in sorted((places.keys() | files.absent.keys()) - found.keys()):
    file = files.absent.get(name)
    where = "" if file is None else f", which {INDEX} places in {file}"
    problems.append(f"missing: {name}{where}")
  for name in sorted(places.keys() & found.keys()):
    shape, expected = found[name], places[name].external_shape
    if shape != expected:
      problems.append(
        f"{name} has shape {list(shape)}, expected {list(expected)}"
      )
  problems += [f"unexpected: {x}" for x in sorted(found.keys() - places.keys())]
  if problems:
    raise ConfigError(
      f"the tensors of {directory} do not fit its config.json"
      f" ({config.num_layers} layers, width {config.width}, {config.num_heads}"
      f" heads and {config.num_kv_heads} for keys, head_dim {config.head_dim},"
      f" mlp {config.mlp_width}, vocabulary {config.vocab_size}):\n  "
      + "\n  ".join(problems)
    )
  return places


def check_tokenizer(directory: pathlib.Path, config: ModelConfig) -> None:
  """Raises ConfigError if a tokenizer has ids that the model has not."""
  path = directory / tokenizer_file.FILE_NAME
  if not path.is_file():
    return
  try:
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    # Unigram models list their tokens, others map them to ids.
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = (token["id"] for token in tokenizer.get("added_tokens") or ())
    largest = max(itertools.chain(ids, added), default=-1)
  except (ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{path} is no tokenizer: {error!r}.") from None
  if largest >= config.vocab_size:
    raise ConfigError(
      f"{path} has ids up to {largest}, but the model's vocabulary has"
      f" {config.vocab_size}: the tokenizer belongs to another model."
    )


def stored_dtype(files: TensorFiles) -> str:
  """The dtype of parameters that hold what the files do."""
  return "bfloat16" if set(files.dtypes.values()) == {"BF16"} else "float32"


def _load(
  files: TensorFiles,
  places: Mapping[str, Place],
  dtype: str,
  shardings: Mapping[Path, jax.sharding.Sharding | None],
) -> dict[Path, jax.Array]:
  by_path: dict[Path, list[str]] = {}
  for name, place in places.items():
    by_path.setdefault(place.path, []).append(name)

  def read(name: str) -> np.ndarray:
    return places[name].to_internal(files.read(name))

  params = {}
  for path, names in by_path.items():
    place = places[names[0]]
    stacked = place.layer is not None
    params[path] = assemble(
      [partial(read, name) for name in names],
      (len(names), *place.shape) if stacked else place.shape,
      dtype,
      stacked=stacked,
      row_axes=place.inputs or 1,
      sharding=shardings[path],
    )
  return params


def _initial_routing(
  config: ModelConfig,
  shardings: Mapping[Path, jax.sharding.Sharding | None],
) -> dict[Path, jax.Array]:
  """Routing parameters as at initialisation; the others are not computed."""

  @jax.jit
  def init():
    variables = TransformerLM(config).init(
      jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )
    params = traverse_util.flatten_dict(nn.meta.unbox(variables)["params"])
    return {path: x for path, x in params.items() if is_routing(path)}

  return {
    path: x if shardings[path] is None else jax.device_put(x, shardings[path])
    for path, x in init().items()
  }


def _check_params(config: ModelConfig, params: Any) -> None:
  expected = traverse_util.flatten_dict(parameter_shapes(config))
  found = traverse_util.flatten_dict(params)
  problems = [
    *(
      f"missing: {'/'.join(x)}" for x in sorted(expected.keys() - found.keys())
    ),
    *(
      f"unexpected: {'/'.join(x)}"
      for x in sorted(found.keys() - expected.keys())
    ),
  ]
  for path in expected.keys() & found.keys():
    x, shape = found[path], expected[path].shape
    if x.shape != shape:
      problems.append(f"{'/'.join(path)} has shape {x.shape}, expected {shape}")
    elif isinstance(x, jax.Array) and not x.is_fully_addressable:
      problems.append(f"{'/'.join(path)} lies on several hosts")
  if problems:
    raise ConfigError(
      "the parameters do not fit the config, or are not here:\n  "
      + "\n  ".join(problems)
    )


def _equal(files: TensorFiles, one: str, other: str) -> bool:
  """Whether two tensors are equal bit for bit."""
  return files.shapes[one] == files.shapes[other] and all(
    x.dtype == y.dtype and x.tobytes() == y.tobytes()
    for x, y in zip(files.rows(one), files.rows(other), strict=True)
  )


def _is_ours(path: pathlib.Path) -> bool:
  """Whether a file is one that `save_pretrained` may have written."""
  if path.name == config_json.NAME:
    return config_json.is_model_directory(path.parent)
  return path.is_file() and (
    path.name in (INDEX, *COMPANIONS) or path.suffix == ".safetensors"
  )
