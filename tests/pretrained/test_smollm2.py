"""SmolLM2-135M-Instruct of `make smollm2`: run by `make test-pretrained`."""

import dataclasses
import json
import os
import pathlib

import jax
import numpy as np
import pytest

from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.models.presets import presets
from deltajax.models.transformer import TransformerLM
from tests.checkpoints.test_huggingface import stored_tensors
from tests.checkpoints.test_transformers import (
  transformers_logits,
  transformers_model,
)
from train import convert

pytestmark = pytest.mark.pretrained

SMOLLM2 = pathlib.Path(os.environ.get("SMOLLM2", "runs/smollm2"))
TEXT = pathlib.Path(json.__file__)  # Half prose, half Python.
LENGTH = 512


@pytest.fixture(scope="module")
def tokens():
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
  ids = tokenizer.encode(TEXT.read_text()).ids
  return np.array([ids[:LENGTH]], np.int32)


@pytest.fixture(scope="module")
def reference(tokens):
  return transformers_logits(transformers_model(SMOLLM2), tokens)


def logits(config, params, tokens, dtype="float32"):
  model = TransformerLM(dataclasses.replace(config, dtype=dtype))
  apply = jax.jit(lambda params: model.apply({"params": params}, tokens))
  return np.asarray(apply(params).logits_BxTxV)


def test_it_has_the_shape_of_its_preset():
  config = load_pretrained(SMOLLM2).config
  preset = presets["smollm2-135m"]
  # GGUF holds the epsilon in float32.
  assert config.norm_eps == pytest.approx(preset.norm_eps)
  assert dataclasses.replace(config, norm_eps=preset.norm_eps) == preset


def test_logits_are_those_of_transformers_at_every_position(tokens, reference):
  found = logits(*load_pretrained(SMOLLM2), tokens)
  error = np.abs(found - reference).max(axis=(0, 2))
  print(f"largest logit {np.abs(reference).max()}, difference {error.max()}")
  # Logits are up to 40; float32 alone makes a tenth of this bound.
  assert error.max() < 1e-3
  assert error[LENGTH // 2 :].max() < 3 * np.median(error) + 1e-4
  np.testing.assert_array_equal(found.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("variant", ["delta_block", "rd_delta_block"])
def test_conversion_changes_no_logit(variant, tokens, tmp_path, capsys):
  routing = ("--routing.variant", variant, "--routing.gate", "scalar")
  convert.command(["import", str(SMOLLM2), str(tmp_path / "out"), *routing])
  printed = capsys.readouterr().out
  for dtype in ("bfloat16", "float32"):
    assert f"{dtype}: equal bit for bit" in printed
  base, routed = (load_pretrained(x) for x in (SMOLLM2, tmp_path / "out"))
  assert routed.config.routing.variant == variant
  for dtype in ("bfloat16", "float32"):
    expected = logits(*base, tokens, dtype)
    np.testing.assert_array_equal(logits(*routed, tokens, dtype), expected)


def test_an_export_is_the_model_again(tokens, reference, tmp_path):
  model = load_pretrained(SMOLLM2)
  save_pretrained(tmp_path, *model, like=SMOLLM2)
  written, stored = (stored_tensors(x) for x in (tmp_path, SMOLLM2))
  assert written.keys() == stored.keys()
  for name, tensor in written.items():
    np.testing.assert_array_equal(tensor, stored[name], err_msg=name)
  found = transformers_logits(transformers_model(tmp_path), tokens)
  np.testing.assert_array_equal(found, reference)
  names = {path.name for path in SMOLLM2.iterdir()}
  assert {path.name for path in tmp_path.iterdir()} == names
