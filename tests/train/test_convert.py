"""The command as a user runs it."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from deltajax.checkpoints.huggingface import load_pretrained
from deltajax.checkpoints.manager import Checkpoints, Keep
from deltajax.config import ConfigError, RunConfig, to_dict
from deltajax.training.load import find_model
from deltajax.training.run_directory import RunDirectory
from deltajax.training.step import Trainer
from tests.helpers import assert_trees_equal, run_module, tiny_config
from train import convert

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "testdata" / "huggingface"
DELTA_BLOCK = ("--routing.variant", "delta_block", "--routing.num-blocks", "3")
CONVERT = (*DELTA_BLOCK, "--routing.gate", "scalar")


run = functools.partial(run_module, "train.convert")


@pytest.fixture
def run_directory(tmp_path):
  """A run with two checkpoints of a standard Qwen3."""
  model = tiny_config("standard", dtype="float32", param_dtype="float32")
  config = RunConfig(model=model)
  directory = RunDirectory(tmp_path / "run")
  directory.claim(config)
  state = Trainer(config).compiled_init()
  with Checkpoints(directory.checkpoints, keep=Keep(2)) as saved:
    saved.save(3, state, {}, to_dict(config))
    moved = jax.tree.map(lambda x: 2 * x, state.params)
    state = dataclasses.replace(state, params=moved)
    saved.save(6, state, {}, to_dict(config))
  return directory.root, state.params


def test_import_says_that_nothing_changed(tmp_path):
  done = run("import", DATA / "qwen3-tied", tmp_path / "out", *CONVERT)
  assert done.returncode == 0, done.stderr
  for part in (
    "routing   delta_block: u = p + mix",
    "num_blocks 3; gate scalar",
    "bfloat16: equal bit for bit, logits up to",
    "float32: equal bit for bit, logits up to",
    "198 of them routing",
    f"written   {tmp_path / 'out'}",
  ):
    assert part in done.stdout, (part, done.stdout)
  config, params = load_pretrained(tmp_path / "out")
  assert config.routing.variant == "delta_block"
  base = load_pretrained(DATA / "qwen3-tied").params
  assert_trees_equal(params["layers"]["mlp"], base["layers"]["mlp"])
  assert (tmp_path / "out" / "generation_config.json").is_file()


def test_nothing_is_written_where_something_changed(
  tmp_path, monkeypatch, capsys
):
  found = convert.probe
  monkeypatch.setattr(
    convert,
    "probe",
    lambda *args, **options: dataclasses.replace(
      found(*args, **options), equal=False
    ),
  )
  arguments = ("import", DATA / "llama-tied", tmp_path / "out", *CONVERT)
  with pytest.raises(SystemExit) as raised:
    convert.command([str(x) for x in arguments])
  assert raised.value.code == 1
  assert "must be equal; nothing was written" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen3-untied", "llama-transformers4"])
def test_import_and_export_give_the_model_back(name, tmp_path, capsys):
  own, out = tmp_path / "own", tmp_path / "out"
  convert.command(["import", str(DATA / name), str(own)])
  convert.command(["export", str(own), str(out)])
  capsys.readouterr()
  expected = {}
  for file in (DATA / name).glob("*.safetensors"):
    expected |= safetensors.numpy.load_file(file)
  written = safetensors.numpy.load_file(out / "model.safetensors")
  assert written.keys() == expected.keys()
  for key, tensor in written.items():
    assert tensor.dtype == expected[key].dtype
    np.testing.assert_array_equal(tensor, expected[key], err_msg=key)
  ours, theirs = (
    json.loads((x / "config.json").read_text()) for x in (out, DATA / name)
  )
  assert ours["eos_token_id"] == theirs["eos_token_id"]


def test_export_of_a_run_takes_its_newest_checkpoint(
  run_directory, tmp_path, capsys
):
  root, params = run_directory
  convert.command(["export", str(root), str(tmp_path / "out")])
  assert f"{root} after 6 updates" in capsys.readouterr().out
  assert_trees_equal(load_pretrained(tmp_path / "out").params, params)
  older = [str(root / "checkpoints" / "3"), str(tmp_path / "older")]
  convert.command(["export", *older, "--dtype", "bfloat16"])
  config, restored = load_pretrained(older[1], param_dtype=None)
  assert config.param_dtype == "bfloat16"
  np.testing.assert_array_equal(
    restored["embedding"], (params["embedding"] / 2).astype("bfloat16")
  )


def test_a_save_that_never_ended_is_left_alone(run_directory):
  root, _ = run_directory
  unfinished = root / "checkpoints" / "9.orbax-checkpoint-tmp"
  unfinished.mkdir()
  assert find_model(root).step == 6
  assert unfinished.is_dir()
  shutil.rmtree(root / "checkpoints")
  (root / "checkpoints").mkdir()
  with pytest.raises(ConfigError, match="has no complete checkpoint"):
    find_model(root)


def test_inspect_loads_no_weights(run_directory, monkeypatch, capsys):
  monkeypatch.setattr(convert.TensorFiles, "read", None)
  convert.command(["inspect", str(DATA / "llama-untied")])
  printed = capsys.readouterr().out
  for part in (
    "stored as F32",
    "3 layers, width 16, 4 heads and 2 for keys, of 8",
    "attention_bias, mlp_bias",
    "scaling llama3",
    "0 of them routing (0.00%)",
    "layers/attention/query/kernel   [3, 16, 4, 8]",
  ):
    assert part in printed, (part, printed)
  convert.command(["inspect", str(run_directory[0])])
  printed = capsys.readouterr().out
  assert "after 6 updates, stored as float32" in printed
  assert re.search(r"embedding +\[41, 16\]", printed)


def test_a_model_that_is_refused_is_not_even_read(tmp_path, monkeypatch):
  own = tmp_path / "own"
  convert.command(["import", str(DATA / "qwen3-tied"), str(own), *DELTA_BLOCK])
  monkeypatch.setattr(convert.TensorFiles, "read", None)
  with pytest.raises(ConfigError, match="has no variant 'delta_block'"):
    convert.command(["export", str(own), str(tmp_path / "out")])
  assert list(tmp_path.iterdir()) == [own]
