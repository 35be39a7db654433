"""Beside transformers itself: `make test-reference`.

Kinds of models that the committed references (test_huggingface.py) do not have,
and what transformers makes of the directories that we write.
"""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from deltajax.checkpoints.config_json import config_values, model_config
from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.checkpoints.names import tensor_places
from deltajax.config import RopeScaling
from deltajax.models.presets import presets
from tests.checkpoints.test_huggingface import DATA, MODELS, stored_tensors
from tests.helpers import logits_of, random_params, tiny_config

pytestmark = pytest.mark.reference

SIZES = {
  "vocab_size": 37,
  "hidden_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "intermediate_size": 24,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
TOKENS = np.random.default_rng(0).integers(37, size=(2, 70))


@pytest.fixture(scope="module", autouse=True)
def quiet():
  """Imports the libraries, which `make test` does not have."""
  import transformers

  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()


def random_model(kind, seed, **options):
  import torch
  import transformers

  torch.manual_seed(seed)
  config = getattr(transformers, f"{kind}Config")(**SIZES | options)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  )
  with torch.no_grad():
    for name, x in model.named_parameters():
      size = 0.1 if "embed_tokens" in name or "lm_head" in name else 0.3
      x.normal_(1, 0.3) if "norm" in name else x.normal_(0, size)
  return model.eval()


def transformers_model(directory):
  import torch
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager"
  ).eval()


def transformers_logits(model, tokens=TOKENS):
  import torch

  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.numpy()


def our_logits(directory, tokens=TOKENS):
  config, params = load_pretrained(directory)
  config = dataclasses.replace(config, dtype="float32")
  return logits_of(config, params, tokens.astype(np.int32))


MODELS_TO_MAKE = [
  (kind, {"tie_word_embeddings": tied, "num_key_value_heads": kv, **options})
  for tied, kv, (kind, options) in zip(
    (True, False) * 4,
    (1, 2, 4, 2) * 2,
    [
      ("Qwen3", {"head_dim": 8}),
      ("Qwen3", {"head_dim": 2, "attention_bias": True}),
      ("Qwen3", {"head_dim": 8, "rope_parameters": LLAMA3}),
      ("Qwen3", {"head_dim": 4, "rms_norm_eps": 1e-3}),
      ("Llama", {}),
      ("Llama", {"head_dim": 8, "attention_bias": True}),
      ("Llama", {"head_dim": 8, "rope_parameters": LLAMA3}),
      ("Llama", {"mlp_bias": True, "rms_norm_eps": 1e-3}),
    ],
    strict=True,
  )
]


@pytest.mark.parametrize(("kind", "options"), MODELS_TO_MAKE)
def test_logits_at_every_position_and_back(kind, options, tmp_path):
  model = random_model(kind, seed=len(str(options)), **options)
  model.save_pretrained(tmp_path / "theirs")
  expected = transformers_logits(model)
  found = our_logits(tmp_path / "theirs")
  np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
  # What we write is the same model over there, to the bit.
  save_pretrained(tmp_path / "ours", *load_pretrained(tmp_path / "theirs"))
  again = transformers_logits(transformers_model(tmp_path / "ours"))
  np.testing.assert_array_equal(again, expected)
  written, stored = (stored_tensors(tmp_path / x) for x in ("ours", "theirs"))
  assert written.keys() == stored.keys()
  for name, tensor in written.items():
    np.testing.assert_array_equal(tensor, stored[name], err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_the_committed_logits_are_what_transformers_computes(name):
  reference = safetensors.numpy.load_file(DATA / f"{name}.safetensors")
  logits = transformers_logits(
    transformers_model(DATA / name), reference["input_ids"]
  )
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"qk_norm": False, "mlp_bias": True, "tie_embeddings": False},
    {"attention_bias": True, "rope_scaling": RopeScaling(kind="llama3")},
  ],
)
def test_a_model_of_ours_is_the_same_over_there(options, tmp_path):
  config = tiny_config(
    "standard", dtype="float32", param_dtype="float32", **options
  )
  params = random_params(config)
  save_pretrained(tmp_path, config, params, shard_bytes=10_000)
  model = transformers_model(tmp_path)
  expected = logits_of(config, params, TOKENS.astype(np.int32))
  found = transformers_logits(model)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=3e-6 * scale, rtol=0)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_what_a_config_leaves_out_is_what_transformers_takes(kind):
  import transformers

  sizes = SIZES | {"num_attention_heads": 32, "hidden_size": 64}
  theirs = getattr(transformers, f"{kind}Config")(**sizes)
  full = json.loads(theirs.to_json_string(use_diff=False))
  short = {"model_type": theirs.model_type, **sizes}
  assert model_config(short) == model_config(full)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "smollm2-135m"])
def test_presets_have_the_parameters_of_transformers(name, tmp_path):
  import torch
  import transformers

  config = presets[name]
  values = config_values(config, "float32", own=False)
  (tmp_path / "config.json").write_text(json.dumps(values))
  with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.from_pretrained(tmp_path)
    )
  expected = {name: tuple(x.shape) for name, x in model.named_parameters()}
  places = tensor_places(config)
  assert {x: place.external_shape for x, place in places.items()} == expected
