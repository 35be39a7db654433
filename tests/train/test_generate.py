"""The command as a user runs it, and how it cuts texts."""

import functools
import json

import pytest

from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.training.loop import train
from tests.data import test_tokenizer_file
from tests.helpers import initial_params, run_module, tiny_config
from tests.training import test_loop

BYTES = ByteTokenizer()


run = functools.partial(run_module, "train.generate")


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
  """A run of a few updates, with more ids than its tokenizer has."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  config = test_loop.tiny_config(
    corpus,
    model={"vocab_size": 384},
    optimizer={"warmup_steps": 1},
    steps=2,
    checkpoint_every=2,
    eval_every=2,
  )
  train(config, workdir, test_loop.quiet)
  return workdir


def test_a_run_continues_texts(trained, tmp_path):
  prompt = tmp_path / "prompt.txt"
  prompt.write_text("import é\n")
  arguments = (
    *(trained, "--prompt", "def ", "--prompt-file", prompt),
    *("--max-new-tokens", 12, "--temperature", 1, "--top-k", 50),
  )
  first, again = run(*arguments), run(*arguments)
  assert first.returncode == 0, first.stderr
  assert first.stdout == again.stdout
  one, two = first.stdout.split("\n---\n")
  assert one.startswith("def ")
  assert two.startswith("import é\n")
  assert len(one) > 4
  other = run(*arguments, "--seed", 1)
  assert other.stdout != first.stdout


def test_a_text_ends_where_the_context_does(trained):
  done = run(trained, "--prompt", "x" * 30, "--temperature", 0)
  assert done.returncode == 0, done.stderr
  assert len(done.stdout.rstrip("\n")) <= 32  # data.sequence_length


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
  """A model directory with a tokenizer of its own."""
  path = tmp_path_factory.mktemp("model") / "model"
  described = test_tokenizer_file.train("bytes")
  vocab_size = len(described["model"]["vocab"])
  config = tiny_config(
    "standard", vocab_size=vocab_size, dtype="float32", param_dtype="float32"
  )
  save_pretrained(path, config, initial_params(config))
  (path / "tokenizer.json").write_text(json.dumps(described))
  named = json.dumps({"eos_token": "<|end|>"})
  (path / "tokenizer_config.json").write_text(named)
  values = json.loads((path / "config.json").read_text())
  values["max_position_embeddings"] = 20
  (path / "config.json").write_text(json.dumps(values))
  return path


def test_a_model_directory_continues_texts(model_directory):
  done = run(model_directory, "--prompt", "hello ", "--max-new-tokens", 8)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("hello ")
  assert len(done.stdout) > len("hello \n")
  long = run(model_directory, "--prompt", "hello " * 30)
  assert long.returncode == 2
  assert "the model sees 20" in long.stderr
