"""The command as a user runs it, on a tiny model of bytes."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.config import RoutingConfig
from deltajax.training.load import find_model
from tests.helpers import (
  assert_trees_equal,
  EIGHT_DEVICES,
  initial_params,
  run_module,
  tiny_config,
)

run = functools.partial(run_module, "train.finetune")
ROUTING = RoutingConfig(variant="delta_block", num_blocks=3, gate="scalar")
OPTIONS = (
  *("--data.tokenizer", "bytes", "--data.sequence-length", "32"),
  *("--training.batch-size", "4", "--training.eval-sequences", "8"),
  *("--training.log-every", "1", "--optimizer.warmup-steps", "2"),
  *("--training.steps", "6", "--model.dtype", "float32"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A model directory, as `train.convert import` writes it."""
  directory = tmp_path_factory.mktemp("models")
  config = tiny_config(
    "standard", vocab_size=384, dtype="float32", param_dtype="float32"
  )
  save_pretrained(directory / "plain", config, initial_params(config))
  routed = load_pretrained(directory / "plain", ROUTING)
  save_pretrained(directory / "routed", *routed, layout="deltajax")
  return directory


@pytest.fixture(scope="module")
def arguments(base, corpus):
  return (
    *("configs/finetune_smollm2.py", "--init-from", base / "routed"),
    *("--data.dataset", corpus, "--data.data-dir", corpus.parents[2], *OPTIONS),
  )


def losses(workdir):
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [x["train/loss"] for x in lines if "train/loss" in x]


def test_reports_before_and_after_and_resumes(arguments, tmp_path):
  done = run(*arguments, "--workdir", tmp_path / "run")
  assert done.returncode == 0, done.stderr
  assert re.search(r"start     directory .*routed", done.stdout)
  found = re.findall(r"validation: .* perplexity ([\d.]+) (\w+)", done.stdout)
  (before, first), (after, second) = found
  assert (first, second) == ("before", "after")
  assert float(after) < float(before)
  again = run(*arguments, "--workdir", tmp_path / "run")
  assert "resumed after 6 of 6 updates" in again.stdout
  assert re.findall(r"perplexity ([\d.]+) before", again.stdout) == [before]


def test_a_mesh_starts_with_the_same_model(arguments, tmp_path):
  one = run(*arguments, "--workdir", tmp_path / "one")
  mesh = ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2")
  eight = run(
    *(*arguments, "--workdir", tmp_path / "eight", *mesh), env=EIGHT_DEVICES
  )
  assert one.returncode == eight.returncode == 0, one.stderr + eight.stderr
  np.testing.assert_allclose(
    losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-5
  )


def test_a_run_goes_on_as_another_with_the_base_frozen(arguments, tmp_path):
  first = run(*arguments, "--workdir", tmp_path / "first")
  assert first.returncode == 0, first.stderr
  second = run(
    *(*arguments[:2], tmp_path / "first", *arguments[3:]),
    *("--workdir", tmp_path / "second", "--freeze", "base"),
  )
  assert second.returncode == 0, second.stderr
  assert "which alone learn" in second.stdout
  old, new = (
    jax.device_get(find_model(tmp_path / name).load().params)
    for name in ("first", "second")
  )
  for name in ("attention_router", "mlp_router"):
    moved = jax.tree.map(
      lambda x, y: bool((x != y).any()),
      old["layers"].pop(name),
      new["layers"].pop(name),
    )
    assert all(jax.tree.leaves(moved)), moved
  for tree in (old, new):
    tree.pop("final_router", None)
  assert_trees_equal(new, old)
