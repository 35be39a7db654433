"""SmolLM2 of `make smollm2`: converted, fine-tuned, exported, read again."""

import re

import jax
import numpy as np
import pytest

import deltajax
from deltajax.training.load import find_model
from tests.helpers import assert_trees_equal
from tests.pretrained.test_smollm2 import SMOLLM2
from train import convert, finetune, generate

pytestmark = pytest.mark.pretrained

ROUTING = ("--routing.variant", "delta_block", "--routing.gate", "scalar")


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
  directory = tmp_path_factory.mktemp("smollm2")
  convert.command(["import", str(SMOLLM2), str(directory / "model"), *ROUTING])
  return directory


def fine_tune(directory, name, capsys, *options):
  """Runs the recipe for a few small updates; returns what it printed."""
  finetune.command(
    [
      *("configs/finetune_smollm2.py", "--init-from", str(directory / "model")),
      *("--workdir", str(directory / name), "--model.dtype", "float32"),
      *("--data.data-dir", str(directory / "data")),
      *("--data.sequence-length", "128", "--training.batch-size", "2"),
      *("--training.steps", "12", "--training.log-every", "1"),
      *("--training.eval-sequences", "8", "--optimizer.warmup-steps", "3"),
      *options,
    ]
  )
  return capsys.readouterr().out


def perplexities(printed):
  pattern = r"validation: .* perplexity ([\d.]+) (?:before|after)"
  return [float(x) for x in re.findall(pattern, printed)]


def test_fine_tune_export_and_read_again(routed, tmp_path, capsys):
  printed = fine_tune(routed, "run", capsys)
  print(printed)
  before, after = perplexities(printed)
  assert after < before
  out = tmp_path / "out"
  convert.command(
    ["export", str(routed / "run"), str(out), "--layout=deltajax"]
  )
  trained = find_model(routed / "run").load()
  config, params = deltajax.load_pretrained(out)
  assert config.routing.variant == "delta_block"
  assert_trees_equal(*map(jax.device_get, (params, trained.params)))
  # The gates have opened: it is another model now.
  gates = [
    x["gate"] for name, x in params["layers"].items() if "router" in name
  ]
  assert all(np.abs(gate).max() > 0 for gate in gates)
  capsys.readouterr()
  # The tokenizer came along.
  generate.command(
    [
      *(str(out), "--prompt", "The capital of France is", "--temperature", "0"),
      *("--max-new-tokens", "8", "--stop", "\n"),
    ]
  )
  assert "Paris" in capsys.readouterr().out


def test_only_routing_moves(routed, capsys):
  printed = fine_tune(routed, "frozen", capsys, "--freeze", "base")
  print(printed)
  before, after = perplexities(printed)
  assert after < before
  old, new = (
    jax.device_get(find_model(routed / name).load().params)
    for name in ("model", "frozen")
  )
  for tree in (old, new):
    for name in ("attention_router", "mlp_router"):
      tree["layers"].pop(name)
    tree.pop("final_router", None)
  assert_trees_equal(new, old)
