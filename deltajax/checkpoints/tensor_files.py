"""The safetensors files of a model directory, one tensor in memory at a time.

`model.safetensors`, or shards that `model.safetensors.index.json` lists.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import importlib
import json
import math
import pathlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from deltajax.checkpoints.arrays import contiguous
from deltajax.config import ConfigError
from deltajax.extras import install

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
  "F64": "float64",
  "F32": "float32",
  "F16": "float16",
  "BF16": "bfloat16",
}


def import_safetensors(module: str) -> ModuleType:
  """The library, which only those need who read or write checkpoints."""
  try:
    return importlib.import_module(module)
  except ImportError:
    raise ConfigError(
      "pretrained checkpoints need safetensors, which is not installed:"
      f" {install('pretrained')}."
    ) from None


class TensorFiles:
  """The tensors of a directory, by name; use as a context manager.

  Attributes:
    shapes: name -> shape, of every tensor.
    dtypes: name -> dtype, as safetensors calls it.
    absent: name -> file, of tensors that the index places where they are not.
    problems: one line for each that cannot be used as it is.

  Raises:
    ConfigError: if there are no files, or some are missing or incomplete.
  """

  def __init__(self, directory: pathlib.Path):
    index = _read_index(directory)
    names = sorted(set(index.values())) if index is not None else [SINGLE]
    self._stack = contextlib.ExitStack()
    self._files: dict[str, Any] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    self.problems: list[str] = []
    try:
      for name in names:
        self._add(directory / name, index)
    except BaseException:
      self._stack.close()
      raise
    self.absent = {
      tensor: file
      for tensor, file in (index or {}).items()
      if tensor not in self.shapes
    }

  def __enter__(self) -> "TensorFiles":
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  def read(self, name: str) -> np.ndarray:
    """One tensor."""
    return self._files[name].get_tensor(name)

  def rows(self, name: str, size: int = 1024) -> Iterator[np.ndarray]:
    """A tensor in parts, `size` rows at a time."""
    whole = self._files[name].get_slice(name)
    num_rows = self.shapes[name][0]
    for start in range(0, num_rows, size):
      yield whole[start : min(start + size, num_rows)]

  def _add(self, path: pathlib.Path, index: Mapping[str, str] | None) -> None:
    safetensors = import_safetensors("safetensors")
    try:
      # Reads instead of mapping: a map would count as memory of the process.
      file = self._stack.enter_context(
        safetensors.safe_open(path, "np", backend="pread")
      )
    except safetensors.SafetensorError as error:
      raise ConfigError(
        f"{path} is no complete safetensors file ({error}); copy or download it"
        " again."
      ) from None
    for name in sorted(file.keys()):
      if name in self.shapes:
        self.problems.append(f"duplicate: {name}, again in {path.name}")
        continue
      part = file.get_slice(name)
      self._files[name] = file
      self.shapes[name] = tuple(part.get_shape())
      self.dtypes[name] = part.get_dtype()
      if self.dtypes[name] not in DTYPES:
        self.problems.append(
          f"{name} is stored as {self.dtypes[name]}; {', '.join(DTYPES)} can be"
          " read"
        )
      if index is not None and index.get(name, path.name) != path.name:
        self.problems.append(
          f"{INDEX} places {name} in {index[name]}, but it is in {path.name}"
        )


def _read_index(directory: pathlib.Path) -> dict[str, str] | None:
  """Tensor -> file; None where there is one file and no index."""
  if (directory / SINGLE).is_file():
    return None
  path = directory / INDEX
  if not path.is_file():
    pickled = sorted(f.name for g in PICKLED for f in directory.glob(g))
    if pickled:
      raise ConfigError(
        f"{directory} has its weights in {pickled[0]}, a pickle, which can run"
        " any code when it is read. Save it as safetensors first: load it with"
        " transformers, from a source that you trust, and call"
        " save_pretrained()."
      )
    raise ConfigError(f"{directory} has neither {SINGLE} nor {INDEX}.")
  try:
    index = dict(json.loads(path.read_text())["weight_map"])
    names = sorted(set(index.values()))
    outside = [name for name in names if pathlib.PurePath(name).name != name]
  except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
    raise ConfigError(f"{path} is no index of shards: {error!r}.") from None
  if outside:
    raise ConfigError(
      f"{path} names {outside[0]!r}, which is no file beside it."
    )
  missing = [name for name in names if not (directory / name).is_file()]
  if missing:
    raise ConfigError(
      f"{directory} lacks {len(missing)} of the {len(names)} files that {INDEX}"
      f" names: {', '.join(missing)}."
    )
  return index


def write_tensors(
  directory: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  read: Callable[[str], np.ndarray],
  dtype: str,
  shard_bytes: int,
) -> None:
  """Writes tensors into a directory, as transformers does.

  Args:
    directory: exists, and has no tensors.
    shapes: name -> shape, in the order in which they are written.
    read: gives a tensor; those of one file are in memory together.
    dtype: of the files.
    shard_bytes: size of a file; a larger tensor has one of its own.
  """
  save_file = import_safetensors("safetensors.numpy").save_file
  shards = _shards(shapes, jnp.dtype(dtype).itemsize, shard_bytes)
  files = [SINGLE]
  if len(shards) > 1:
    files = [
      f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
      for i in range(len(shards))
    ]
  for file, names in zip(files, shards, strict=True):
    path = directory / file
    path.touch()
    mode = path.stat().st_mode
    tensors = {name: contiguous(read(name), dtype) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # The library lets nobody else read it.
  if len(shards) > 1:
    size = sum(math.prod(shape) for shape in shapes.values())
    index = {
      "metadata": {"total_size": size * jnp.dtype(dtype).itemsize},
      "weight_map": {
        name: file
        for file, names in zip(files, shards, strict=True)
        for name in names
      },
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(
  shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> list[list[str]]:
  """Names of the tensors of each file."""
  shards: list[list[str]] = [[]]
  size = 0
  for name, shape in shapes.items():
    tensor_bytes = math.prod(shape) * itemsize
    if shards[-1] and size + tensor_bytes > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += tensor_bytes
  return shards
