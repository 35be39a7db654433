"""Settings and data of the whole suite."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
  """A prepared TFDS directory with a small corpus of Python files."""
  from deltajax.data.python_stdlib import PythonStdlib, PythonStdlibConfig
  from deltajax.data.storage import build_dataset

  root = tmp_path_factory.mktemp("corpus") / "sources"
  root.mkdir()
  for i in range(60):
    body = "\n".join(f"value_{j} = {i} * {j}" for j in range(5 + i % 7))
    (root / f"module_{i}.py").write_text(f'"""Module {i}."""\n{body}\n')
  return build_dataset(
    PythonStdlib, root.parent / "data", PythonStdlibConfig.from_root(root)
  )
