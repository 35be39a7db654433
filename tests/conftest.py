"""Settings and data of the whole suite."""

import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Many tests, and the processes that they start, compile the same programs.
# Workers inherit the directory; the process that made it removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _cache = tempfile.TemporaryDirectory(prefix="deltajax-tests-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import pytest


@pytest.fixture
def quick_compiles():
  """Slower programs that are compiled several times faster."""
  import jax

  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


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


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory) -> pathlib.Path:
  """A directory with a tokenizer.json like GPT-2's, of 300 ids."""
  library = pytest.importorskip("tokenizers")
  from tokenizers import decoders, models, pre_tokenizers, trainers

  found = library.Tokenizer(models.BPE())
  found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  found.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<|start|>", "<|end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  found.train_from_iterator(["a value of the depth = 17 * x"] * 9, trainer)
  directory = tmp_path_factory.mktemp("tokenizer")
  found.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(
    '{"bos_token": "<|start|>", "eos_token": "<|end|>"}'
  )
  return directory
