"""Tiny models, a tiny tokenizer and a tiny corpus, for tests of your own.

Models need jax, flax and numpy only, and no compilation; to read what
`write_tokenizer` and `write_model` write takes the extra `pretrained`.

Shapes: B batch, T sequence.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any
import zlib

from flax import traverse_util
import jax
import numpy as np

from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.checkpoints.names import parameter_shapes
from deltajax.config import ModelConfig, RoutingConfig
from deltajax.data.tokenizer_file import FILE_NAME as TOKENIZER_FILE
from deltajax.models.transformer import is_routing

_ROUTING_OPTIONS = {field.name for field in dataclasses.fields(RoutingConfig)}
_SPECIALS = ("<|start|>", "<|end|>")
_PAIRS = ("th", "he", "in", "er", "an", "on", "re", "at", "en", "or", " t")


def tiny_config(variant: str = "delta_block", **options: Any) -> ModelConfig:
  """A model of 6 layers in 3 blocks and width 16, in float32.

  Its 320 ids are enough for the byte tokenizer and for `write_tokenizer`.

  Args:
    variant: of the routing, a name of `deltajax.VARIANTS`.
    **options: fields of ModelConfig (`routing` excepted) and of RoutingConfig.

  Raises:
    ConfigError: for unknown options and values that cannot be used.

  Examples:
    >>> config = tiny_config("rd_delta", num_layers=2, heads=4)
    >>> config.width, config.routing.variant, config.routing.heads
    (16, 'rd_delta', 4)
  """
  names = options.keys() & _ROUTING_OPTIONS
  routing = {name: options.pop(name) for name in names}
  defaults: dict[str, Any] = {
    "vocab_size": 320,
    "width": 16,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 24,
    "dtype": "float32",
  }
  model = {**defaults, **options}
  blocks = max(1, min(3, model["num_layers"]))
  row = {"variant": variant, "num_blocks": blocks, **routing}
  return ModelConfig(**model, routing=RoutingConfig(**row))


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
  """Parameters with nothing left at zero or one, as NumPy arrays.

  A value depends on its parameter's name and shape and the seed alone, so that
  variants share whatever they have in common.

  Args:
    config: of a model of any size; nothing is compiled.
    seed: of the values.

  Examples:
    >>> params = random_params(tiny_config("delta"))
    >>> params["embedding"].shape
    (320, 16)
    >>> bool(params["layers"]["attention_router"]["query"].all())
    True
  """
  flat = traverse_util.flatten_dict(shapes(config))
  return traverse_util.unflatten_dict(
    {path: _random(path, x, seed) for path, x in flat.items()}
  )


def random_tokens(
  config: ModelConfig, batch: int = 2, length: int = 9, seed: int = 0
) -> np.ndarray:
  """Token ids [B, T], int32.

  Args:
    config: of a model, for its number of ids.
    batch: B.
    length: T.
    seed: of the values.

  Examples:
    >>> random_tokens(tiny_config(), batch=1, length=4).shape
    (1, 4)
  """
  rng = np.random.default_rng(seed)
  return rng.integers(config.vocab_size, size=(batch, length), dtype=np.int32)


@functools.cache
def shapes(config: ModelConfig) -> dict[str, Any]:
  """The parameters of a model as a tree of ShapeDtypeStructs.

  Examples:
    >>> shapes(tiny_config())["layers"]["mlp_router"]["query"].shape
    (6, 1, 16)
  """
  with precision(config.dtype):
    return parameter_shapes(config)


def precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
  """The context in which a model of this dtype runs: float64 needs x64.

  Examples:
    >>> import jax.numpy as jnp
    >>> with precision("float64"):
    ...   print(jnp.zeros(1).dtype)
    float64
  """
  return jax.enable_x64(dtype == "float64")


def write_tokenizer(directory: str | os.PathLike[str]) -> pathlib.Path:
  """Writes a byte-level BPE tokenizer of 269 ids, as Hugging Face has it.

  Every text can be encoded and comes back as it was. Nothing is needed to write
  it; to read it, the `tokenizers` library (extra `pretrained`).

  Args:
    directory: is made if it is not there.

  Returns:
    The directory, which `deltajax.data.tokenizers.get_tokenizer` takes.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  letters = _byte_letters()
  merges = [[letters[ord(x)] for x in pair] for pair in _PAIRS]
  names = [*_SPECIALS, *letters, *map("".join, merges)]
  kind = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
  described = {
    "version": "1.0",
    "added_tokens": [
      {"id": i, "content": name, "special": True, "normalized": False}
      | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
      for i, name in enumerate(_SPECIALS)
    ],
    "pre_tokenizer": {"type": "ByteLevel", **kind},
    "decoder": {"type": "ByteLevel", **kind},
    "model": {
      "type": "BPE",
      "vocab": {name: i for i, name in enumerate(names)},
      "merges": merges,
    },
  }
  (directory / TOKENIZER_FILE).write_text(json.dumps(described))
  specials = dict(zip(("bos_token", "eos_token"), _SPECIALS, strict=True))
  (directory / "tokenizer_config.json").write_text(json.dumps(specials))
  return directory


def write_corpus(
  directory: str | os.PathLike[str], *, documents: int = 60, suffix: str = "txt"
) -> pathlib.Path:
  """Writes small files of text that a tiny model learns within seconds.

  They are programs of a few lines, all different.

  Args:
    directory: is made if it is not there.
    documents: how many.
    suffix: of their names; files of text are `txt`.

  Returns:
    The directory, which `DataConfig.dataset` takes (as a path with a "/").
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for i in range(documents):
    body = "\n".join(f"value_{j} = {i} * {j}" for j in range(5 + i % 7))
    text = f'"""Module {i}."""\n{body}\n'
    (directory / f"module_{i}.{suffix}").write_text(text)
  return directory


def write_model(
  directory: str | os.PathLike[str], variant: str = "standard", **options: Any
) -> pathlib.Path:
  """Writes a tiny Llama with its tokenizer, as transformers would.

  Needs safetensors (extra `pretrained`).

  Args:
    directory: is made, or replaced if it holds a model and nothing else.
    variant: of the routing; one other than `standard` is written in the
      layout of deltajax.
    **options: as for `tiny_config`.

  Returns:
    The directory, which `deltajax.load_pretrained` takes.

  Raises:
    ConfigError: as `tiny_config` and `deltajax.save_pretrained` do.
  """
  config = tiny_config(variant, **{"qk_norm": False, **options})
  layout = "huggingface" if variant == "standard" else "deltajax"
  save_pretrained(directory, config, random_params(config), layout=layout)
  return write_tokenizer(directory)


def _byte_letters() -> list[str]:
  """The letter that byte-level BPE writes for each byte, as GPT-2 does.

  Bytes that cannot be seen get letters from 256 on.
  """
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  unseen = [i for i in range(256) if i not in seen]
  return [chr(i if i in seen else 256 + unseen.index(i)) for i in range(256)]


def _random(path: tuple[str, ...], struct: Any, seed: int) -> np.ndarray:
  name = path[-1]
  rng = np.random.default_rng([zlib.crc32("/".join(path).encode()), seed])
  normal = rng.standard_normal(struct.shape)
  if name in ("scale", "key_norm"):
    x = 1 + 0.3 * normal
  elif name == "gate" and is_routing(path):
    x = 0.5 + 0.3 * normal
  elif name in ("kernel", "head"):
    x = 0.3 * normal
  else:  # embedding, queries, null sources
    x = normal
  return x.astype(struct.dtype)
