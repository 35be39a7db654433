"""Tiny models, their parameters and their logits, for the whole suite.

Everything here is compiled: linen run op by op takes seconds per model.
Models whose dtype is float64 run with x64 enabled, the others without.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

from flax import linen as nn, traverse_util
import jax
import numpy as np

from deltajax import testing
from deltajax.config import ModelConfig
from deltajax.models.transformer import is_routing, TransformerLM
from deltajax.routing.partial_read import MASKED
from deltajax.testing import (
  precision as precision,
  random_params as random_params,
  random_tokens as random_tokens,
  shapes as shapes,
)

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no such option
  QUICK["xla_cpu_use_fusion_emitters"] = False
# The same for a process of its own, as XLA_FLAGS.
QUICK_FLAGS = " ".join(f"--{k}={v}".lower() for k, v in QUICK.items())

ROOT = pathlib.Path(__file__).parents[1]
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def run_module(module, *arguments, env=None):
  """Runs `python -m module` from the repository, as a user would.

  Args:
    module: its name.
    *arguments: of the command line.
    env: variables besides those of this process.
  """
  return _run_python("-m", module, *arguments, env=env)


def run_program(file, *arguments):
  """Runs a file of the repository, with the repository's modules.

  Args:
    file: its path.
    *arguments: of the command line.
  """
  return _run_python(file, *arguments, env={"PYTHONPATH": str(ROOT)})


def build_corpus(root, data_dir) -> pathlib.Path:
  """A TFDS directory of the Python files below a directory.

  Made as that of the standard library, and under its name.

  Args:
    root: where the files are.
    data_dir: where data sets are kept; of one directory, for no other.
  """
  from deltajax.data import python_stdlib, storage

  with mock.patch.object(
    python_stdlib, "library_root", return_value=pathlib.Path(root)
  ):
    return storage.build_dataset(python_stdlib.PythonStdlib, data_dir)


def documented_fields(docs: pathlib.Path, file: str, of: str) -> list[str]:
  """Fields in a table of a schema.

  Args:
    docs: describes a file in a section named after it.
    file: its name.
    of: words, after which the table comes.
  """
  text = docs.read_text()
  text = text[text.index(f"## {file}") :]
  lines = text[text.index(of) :].splitlines()
  start = next(i for i, line in enumerate(lines) if line.startswith("| field"))
  rows = itertools.takewhile(lambda x: x.startswith("| `"), lines[start + 2 :])
  return [row.split("`")[1] for row in rows]


def _run_python(*arguments, env=None):
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=ROOT,
    env=os.environ | (env or {}),
    capture_output=True,
    text=True,
    encoding="utf-8",
    check=False,
  )


def tiny_config(variant: str = "delta_block", **options) -> ModelConfig:
  """That of `deltajax.testing`, in float64 and with fewer ids.

  Args:
    variant: of the routing.
    **options: fields of ModelConfig and of RoutingConfig.
  """
  defaults = {
    "vocab_size": 41,
    "dtype": "float64",
    "param_dtype": "float64",
  }
  return testing.tiny_config(variant, **{**defaults, **options})


def with_params(params: dict, **replacements) -> dict:
  """A copy with every parameter of these last names replaced.

  Args:
    params: the parameters.
    **replacements: last part of a name -> function of the old value.
  """
  flat = traverse_util.flatten_dict(params)
  return traverse_util.unflatten_dict(
    {
      path: replacements[path[-1]](x)
      if path[-1] in replacements and is_routing(path)
      else x
      for path, x in flat.items()
    }
  )


def zero_queries(params: dict) -> dict:
  """A copy in which every depth-routing query is zero."""
  return with_params(params, query=np.zeros_like)


def assert_mostly_close(found, expected, most, all_, name) -> None:
  """Checks errors relative to the largest element, and that all is finite.

  Args:
    found: an array.
    expected: what it should be; elements of `MASKED` do not count as large.
    most: bound for 99% of the elements.
    all_: bound for all of them.
    name: of the array, for messages.
  """
  assert np.isfinite(found).all(), name
  # Some are exactly zero everywhere: compared absolutely.
  scale = np.abs(expected[expected > MASKED]).max(initial=1e-2)
  error = np.abs(found - expected) / scale
  assert np.quantile(error, 0.99) <= most, name
  assert error.max() <= all_, name


def changed_fields(case) -> str:
  """Names a dataclass of a test by what differs from its defaults."""
  return "-".join(
    f"{field.name}{getattr(case, field.name)}".replace(" ", "")
    for field in dataclasses.fields(case)
    if getattr(case, field.name) != field.default
  )


def quick_jit(function: Callable) -> Callable:
  """`jax.jit` that compiles several times faster, to slower programs."""
  return jax.jit(function, compiler_options=QUICK)


@functools.cache
def compiled(config: ModelConfig) -> Callable:
  """The jitted model: (params, tokens, segment_ids, positions) -> logits."""
  model = TransformerLM(config)

  def apply(params, tokens, segment_ids, positions):
    return model.apply(
      {"params": params}, tokens, segment_ids=segment_ids, positions=positions
    ).logits_BxTxV

  return quick_jit(apply)


def logits_of(
  config: ModelConfig, params, tokens, segment_ids=None, positions=None
) -> np.ndarray:
  """Logits [B, T, V], computed in the precision of the config."""
  with precision(config.dtype):
    return np.asarray(compiled(config)(params, tokens, segment_ids, positions))


@functools.cache
def initial_variables(config: ModelConfig, seed: int = 0) -> dict:
  """What `init` gives, in boxes that name the axes."""
  with precision(config.dtype):
    init = quick_jit(TransformerLM(config).init)
    return init(jax.random.key(seed), random_tokens(config))


def initial_params(config: ModelConfig, seed: int = 0) -> dict:
  """Initial parameters as NumPy arrays."""
  params = nn.meta.unbox(initial_variables(config, seed))["params"]
  return jax.tree.map(np.asarray, params)


def relative_error(actual, expected) -> float:
  """Largest difference over the largest expected value."""
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  assert actual.shape == expected.shape
  return float(np.abs(actual - expected).max() / np.abs(expected).max())


def assert_trees_equal(actual, expected) -> None:
  """Bit for bit."""
  actual, expected = (traverse_util.flatten_dict(x) for x in (actual, expected))
  assert actual.keys() == expected.keys()
  for path, x in actual.items():
    np.testing.assert_array_equal(x, expected[path], err_msg="/".join(path))


def assert_trees_close(actual, expected, tolerance: float) -> None:
  """Within `tolerance` of the largest value of each leaf."""
  actual, expected = (traverse_util.flatten_dict(x) for x in (actual, expected))
  assert actual.keys() == expected.keys()
  for path, x in actual.items():
    x, y = np.asarray(x, np.float64), np.asarray(expected[path], np.float64)
    bound = tolerance * max(np.abs(y).max(initial=0.0), 1e-3)
    np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg="/".join(path))
