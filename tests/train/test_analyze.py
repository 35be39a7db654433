"""The command as a user runs it, and what it refuses before any work."""

import json
import shutil

import jax
import numpy as np
import pytest

from deltajax.config import ConfigError, RoutingConfig
from tests.helpers import (
  EIGHT_DEVICES,
  QUICK_FLAGS,
  run_module,
)
from tests.train.places import make_run, save_model
from train.analyze import command


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  """A run of two updates and two checkpoints."""
  routing = RoutingConfig(
    variant="rd_delta_block", num_blocks=2, query_init_std=0.5
  )
  workdir = tmp_path_factory.mktemp("runs") / "routed"
  model = {"routing": routing, "num_kv_heads": 2, "vocab_size": 260}
  return make_run(corpus, workdir, model=model)


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
  """A model directory without a tokenizer."""
  return save_model(tmp_path_factory.mktemp("models") / "standard")


def test_models_side_by_side(run, standard, tmp_path, capsys):
  out = tmp_path / "new" / "out"
  command([str(run), str(standard), "--out", str(out), "--rows", "6"])
  printed = capsys.readouterr().out
  assert "6 rows of 32 tokens" in printed
  assert f"model     run {run} after 2 updates" in printed
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
    " --context",
  ):
    command(arguments)
  command([*arguments, "--context", "16", "--no-gradients"])
  values = json.loads((tmp_path / "out" / "routing.json").read_text())
  assert values["data"]["sequence_length"] == 16
