"""The tokenizer of a pretrained model: tokenizer.json, as Hugging Face has it.

Needs the `tokenizers` library (extra `pretrained`), which is imported when a
file is read. Chat templates are not applied; a prompt may spell them out.

Shapes: V vocabulary.
"""

from collections.abc import Iterator, Sequence
import functools
import hashlib
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from deltajax.extras import install
from deltajax.routing.validation import ConfigError

FILE_NAME = "tokenizer.json"
_MODEL_FILES = ("config.json", "generation_config.json")


class FileTokenizer:
  """A `Tokenizer` that a file defines.

  Special ids are those that tokenizer_config.json, config.json and
  generation_config.json beside the file name, in this order. One that nothing
  names raises ConfigError when it is asked for, except that documents start,
  and padding is, with the id that ends documents.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads a tokenizer.json, or that of a directory.

    Raises:
      ConfigError: there is no such file, it is no tokenizer, or the
        `tokenizers` library is not installed.
    """
    path = pathlib.Path(path)
    self._file = path / FILE_NAME if path.is_dir() else path
    if not self._file.is_file():
      raise ConfigError(
        f"there is no tokenizer at {self._file}; name a {FILE_NAME}, or the"
        " directory that holds one."
      )
    self._plain = self._read()
    # What a text happens to spell is text, even if it looks like a special id.
    self._plain.encode_special_tokens = True
    self._names: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
    self.vocab_size = 1 + max(self._names.values(), default=-1)

  @property
  def bos_id(self) -> int:
    """The id that starts every document; that which ends them, if none does."""
    found = self._special("bos_token")
    return found if found is not None else self.eos_id

  @property
  def eos_id(self) -> int:
    """The id that ends every document."""
    found = self._special("eos_token")
    if found is None:
      raise ConfigError(
        f"nothing beside {self._file} says which token ends a text; write"
        ' {"eos_token": "..."} to tokenizer_config.json there.'
      )
    return found

  @property
  def pad_id(self) -> int:
    """The id of positions that hold nothing."""
    found = self._special("pad_token")
    return found if found is not None else self.eos_id

  def files(self) -> dict[str, pathlib.Path]:
    """All that it is made of, by the names that a directory of it has."""
    beside = {name: self._file.with_name(name) for name in self._beside}
    return {FILE_NAME: self._file} | {
      name: file for name, file in beside.items() if file.is_file()
    }

  @functools.cached_property
  def fingerprint(self) -> str:
    """sha256 (hex) of the file, and the ids around a document."""
    digest = hashlib.sha256(self._file.read_bytes()).hexdigest()
    return f"{digest} {self.bos_id} {self.eos_id} {self.pad_id}"

  @functools.cached_property
  def stop_ids(self) -> tuple[int, ...]:
    """Every id that is named as the end of a text."""
    ids = [self._special("eos_token")]
    for file in _MODEL_FILES:
      named = self._beside[file].get("eos_token_id")
      ids += named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(i for i in ids if i is not None))

  @functools.cached_property
  def bytes_per_token(self) -> np.ndarray:
    """[V] int32: UTF-8 bytes that each id stands for, 0 for specials."""
    kinds = set(_kinds(json.loads(self._file.read_text())))
    added = self._plain.get_added_tokens_decoder()
    sizes_V = np.zeros(self.vocab_size, np.int32)
    for name, i in self._names.items():
      if i in added:
        sizes_V[i] = 0 if added[i].special else len(name.encode())
      elif "ByteLevel" in kinds:  # A character of the name is a byte.
        sizes_V[i] = len(name)
      elif "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", name):
        sizes_V[i] = 1
      else:
        sizes_V[i] = len(name.replace("▁", " ").encode())
    return sizes_V

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of `text`, int32, without special ids."""
    found = self._plain.encode(
      _without_surrogates(text), add_special_tokens=False
    )
    return np.array(found.ids, np.int32)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns what `encode` does for each text, in several threads.

    RAYON_NUM_THREADS says how many, if it is set before the first call.
    """
    found = self._plain.encode_batch_fast(
      [_without_surrogates(text) for text in texts], add_special_tokens=False
    )
    return [np.array(encoding.ids, np.int32) for encoding in found]

  def encode_prompt(self, text: str) -> np.ndarray:
    """Returns int32 ids as the model expects a prompt.

    Special ids that the file puts in front are there, and those that the text
    spells are what they spell.
    """
    found = self._prompting.encode(_without_surrogates(text))
    return np.array(found.ids, np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of `ids`, special ids skipped.

    Raises:
      ConfigError: an id is outside the vocabulary.
    """
    ids = np.asarray(ids, np.int64)
    bad = ids[(ids < 0) | (ids >= self.vocab_size)]
    if bad.size:
      raise ConfigError(
        f"token id {bad[0]} is outside the vocabulary of {self._file}: ids are"
        f" 0 to {self.vocab_size - 1}."
      )
    return self._plain.decode(ids.tolist(), skip_special_tokens=True)

  @functools.cached_property
  def _prompting(self) -> Any:
    return self._read()

  def _read(self) -> Any:
    try:
      import tokenizers
    except ModuleNotFoundError:
      raise ConfigError(
        f"{self._file} needs the tokenizers library: {install('pretrained')}."
      ) from None
    try:
      found = tokenizers.Tokenizer.from_file(str(self._file))
    except Exception as error:  # The library raises nothing narrower.
      raise ConfigError(f"{self._file} is no tokenizer: {error}.") from None
    found.no_truncation()
    found.no_padding()
    return found

  def _special(self, kind: str) -> int | None:
    """The id of `bos_token`, `eos_token` or `pad_token`, if one is named."""
    name = self._beside["tokenizer_config.json"].get(kind)
    if isinstance(name, dict):
      name = name.get("content")
    if name is not None:
      if name not in self._names:
        raise ConfigError(
          f"tokenizer_config.json names {name!r} as {kind}, which"
          f" {self._file} does not have."
        )
      return self._names[name]
    for file in _MODEL_FILES:
      found = self._beside[file].get(f"{kind}_id")
      if isinstance(found, list):
        found = found[0] if found else None
      if found is not None:
        return found
    return None

  @functools.cached_property
  def _beside(self) -> dict[str, dict[str, Any]]:
    """The JSON files beside the tokenizer; empty where there are none."""
    return {
      name: _read_object(self._file.with_name(name))
      for name in ("tokenizer_config.json", *_MODEL_FILES)
    }


def _read_object(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    return {}
  try:
    found = json.loads(file.read_text())
  except json.JSONDecodeError as error:
    raise ConfigError(f"{file} is not JSON: {error}.") from None
  if not isinstance(found, dict):
    raise ConfigError(f"{file} is no JSON object.")
  return found


def _kinds(value: Any) -> Iterator[str]:
  """The `type` of everything that a tokenizer is made of."""
  if isinstance(value, dict):
    if isinstance(value.get("type"), str):
      yield value["type"]
    for name in ("pre_tokenizer", "decoder", "pretokenizers", "decoders"):
      yield from _kinds(value.get(name))
  elif isinstance(value, list):
    for x in value:
      yield from _kinds(x)


def _without_surrogates(text: str) -> str:
  """What UTF-8 cannot express becomes "?"."""
  return text.encode("utf-8", errors="replace").decode("utf-8")
