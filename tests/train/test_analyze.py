"""The command as a user runs it, and what it refuses before any work."""

import json
import shutil

import jax
import numpy as np
import pytest

from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.config import ConfigError, RoutingConfig
from deltajax.training.loop import train
from tests.data import test_tokenizer_file
from tests.helpers import (
  EIGHT_DEVICES,
  initial_params,
  QUICK_FLAGS,
  run_module,
  tiny_config,
)
from tests.training import test_loop
from train.analyze import command


def make_run(corpus, workdir, **options):
  config = test_loop.tiny_config(
    corpus,
    optimizer={"warmup_steps": 1},
    steps=2,
    checkpoint_every=1,
    eval_every=2,
    **options,
  )
  train(config, workdir, test_loop.quiet)
  return workdir


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  """A run of two updates and two checkpoints."""
  routing = RoutingConfig(
    variant="rd_delta_block", num_blocks=2, query_init_std=0.5
  )
  workdir = tmp_path_factory.mktemp("runs") / "routed"
  model = {"routing": routing, "num_kv_heads": 2, "vocab_size": 260}
  return make_run(corpus, workdir, model=model)


def save_model(path, vocab_size=259, variant="standard"):
  config = tiny_config(
    variant,
    vocab_size=vocab_size,
    num_layers=2,
    num_blocks=2,
    dtype="float32",
    param_dtype="float32",
  )
  save_pretrained(path, config, initial_params(config), layout="deltajax")
  return path


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
  """A model directory without a tokenizer."""
  return save_model(tmp_path_factory.mktemp("models") / "standard")


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
  """A model directory with a tokenizer of its own."""
  described = test_tokenizer_file.train("bytes")
  path = tmp_path_factory.mktemp("models") / "other"
  save_model(path, vocab_size=len(described["model"]["vocab"]))
  (path / "tokenizer.json").write_text(json.dumps(described))
  named = json.dumps({"eos_token": "<|end|>"})
  (path / "tokenizer_config.json").write_text(named)
  return path


def test_models_side_by_side(run, standard, tmp_path, capsys):
  out = tmp_path / "new" / "out"
  command([str(run), str(standard), "--out", str(out), "--rows", "6"])
  printed = capsys.readouterr().out
  assert "6 rows of 32 tokens" in printed
  assert f"run       {run} after 2 updates" in printed
  assert "no weights to analyse, only norms" in printed
  assert f"report    {out}/report.html" in printed
  values = json.loads((out / "routing.json").read_text())
  assert values["data"]["rows"] == 6
  assert values["data"]["tokenizer"] == "bytes"
  routed, plain = values["models"]
  assert (routed["name"], plain["name"]) == ("routed", "standard")
  assert routed["source"] == f"run {run} after 2 updates"
  assert routed["config"]["routing"]["variant"] == "rd_delta_block"
  assert routed["analysis"]["tokens"] == plain["analysis"]["tokens"]
  assert len(routed["analysis"]["reads"]) == 4
  assert plain["analysis"]["reads"] == []
  for model in (routed, plain):
    gradients = model["analysis"]["norms"]["gradient_norm"]
    assert len(gradients) == 4
    assert min(gradients) > 0
  page = (out / "report.html").read_text()
  assert page.count("<figure>") == len(list(out.glob("figures/*.png"))) == 7


def test_a_mesh_of_8_devices_finds_what_one_device_does(run, tmp_path):
  one, many = tmp_path / "one", tmp_path / "many"
  arguments = (str(run), "--rows", "6")
  command([*arguments, "--out", str(one)])
  axes = ("--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "2")
  flags = f"{EIGHT_DEVICES['XLA_FLAGS']} {QUICK_FLAGS}"
  done = run_module(
    "train.analyze",
    *(*arguments, *axes, "--mesh.context", "2", "--out", many),
    env={"XLA_FLAGS": flags},
  )
  assert done.returncode == 0, done.stderr
  expected, found = (
    jax.tree.leaves(json.loads((out / "routing.json").read_text()))
    for out in (one, many)
  )
  for x, y in zip(found, expected, strict=True):
    if isinstance(x, float):
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    else:
      assert x == y


def test_user_errors_are_one_message():
  done = run_module("train.analyze", "configs", "--out", "no/such")
  assert done.returncode == 2
  assert "error: configs is neither a model directory" in done.stderr
  assert "Traceback" not in done.stderr
  assert not done.stdout


def test_checkpoints_of_one_run_have_names_of_their_own(run, tmp_path):
  out = tmp_path / "out"
  first = run / "checkpoints" / "1"
  command(
    [str(run), str(first), "--out", str(out), "--rows", "4", "--no-gradients"]
  )
  values = json.loads((out / "routing.json").read_text())
  assert [x["name"] for x in values["models"]] == ["routed", "routed at 1"]
  analyses = [x["analysis"] for x in values["models"]]
  assert analyses[0]["norms"]["gradient_norm"] is None
  assert analyses[0]["loss"] != analyses[1]["loss"]


REFUSED = {
  "nothing": ((), "there is nothing to analyse; name runs"),
  "no run": (("no/such/run",), "there is no directory no/such/run"),
  "no model": (("configs",), "configs is neither a model directory"),
  "twice": (("RUN", "RUN"), "is given twice"),
  "no data set": (("STANDARD",), "names no data set; give --dataset"),
  "unknown data set": (
    ("RUN", "--dataset", "python_stdlb"),
    "did you mean 'python_stdlib'",
  ),
  "unknown split": (
    ("RUN", "--split", "validaton"),
    "mean 'validation'",
  ),
  "other tokenizer": (
    ("RUN", "OTHER", "--sequence-length", "32"),
    r"other was trained with tokenizer '.*other/'; the data set is read with"
    " another, 'bytes'",
  ),
  "tokenizer option": (
    ("RUN", "--tokenizer", "OTHER"),
    "routed was trained with tokenizer 'bytes'; .* another",
  ),
  "vocabulary": (
    ("SMALL", "--dataset", "CORPUS", "--tokenizer", "bytes"),
    "tokenizer 'bytes' has 259 ids, the vocabulary of small 100",
  ),
  "no tokenizer": (
    ("STANDARD", "--dataset", "CORPUS"),
    "there is no tokenizer at .*tokenizer.json",
  ),
  "mesh": (
    ("RUN", "--mesh.data", "3"),
    "routed: .* needs 3 devices",
  ),
  "batch": (("RUN", "--batch-size", "0"), r"batch_size is 0; it must be"),
  "rows": (("RUN", "--rows", "0"), "num_rows must be at least 1, got 0"),
  "dtype": (("RUN", "--dtype", "float31"), r"unknown model\.dtype 'float31'"),
  "too long": (("RUN", "--sequence-length", "99999999"), "fewer than one row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_analysed(
  name, run, standard, other_tokenizer, corpus, tmp_path, capsys
):
  arguments, message = REFUSED[name]
  if "SMALL" in arguments:
    save_model(tmp_path / "small", vocab_size=100)
  places = {
    "RUN": run,
    "STANDARD": standard,
    "OTHER": f"{other_tokenizer}",
    "CORPUS": corpus,
    "SMALL": tmp_path / "small",
  }
  found = [str(places.get(argument, argument)) for argument in arguments]
  out = tmp_path / "out"
  with pytest.raises(ConfigError, match=message):
    command([*found, "--out", str(out)])
  assert not out.exists()
  assert not capsys.readouterr().out


def test_runs_on_different_data_are_refused_until_told(run, tmp_path):
  other = tmp_path / "other"
  shutil.copytree(run, other)
  values = json.loads((other / "config.json").read_text())
  values["data"]["sequence_length"] = 16
  (other / "config.json").write_text(json.dumps(values))
  arguments = [str(run), str(other), "--out", str(tmp_path / "out")]
  with pytest.raises(
    ConfigError,
    match=r"differ in data\.sequence_length: 32 in routed, 16 in other\. Give"
    " --sequence-length",
  ):
    command(arguments)
  command([*arguments, "--sequence-length", "16", "--no-gradients"])
  values = json.loads((tmp_path / "out" / "routing.json").read_text())
  assert values["data"]["sequence_length"] == 16


def test_an_output_that_cannot_be_written(run, tmp_path, capsys):
  (tmp_path / "mine.txt").write_text("mine")
  with pytest.raises(ConfigError, match=r"'mine\.txt', which is no part"):
    command([str(run), "--out", str(tmp_path)])
  with pytest.raises(ConfigError, match="cannot be written"):
    command([str(run), "--out", str(tmp_path / "mine.txt" / "out")])
  assert not capsys.readouterr().out
