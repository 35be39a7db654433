"""The authors' released model, reproduced: logits, loss and every gradient.

The reference values come from outside (tests/testdata/golden/README.md).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from deltajax.checkpoints.names import (
  params_from_tensors,
  tensors_from_params,
)
from deltajax.config import ModelConfig, RoutingConfig
from deltajax.models.transformer import output_head, TransformerLM
from deltajax.training.loss import token_loss

GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "golden"
ROUTING = {
  "baseline": {"variant": "standard"},
  "block": {"variant": "attnres_block"},
  "full": {"variant": "attnres_full"},
  "delta": {"variant": "delta"},
  "delta_block": {"variant": "delta_block_released"},
  "delta_block-null": {
    "variant": "delta_block_released",
    "null_source": True,
  },
  "delta_block-learnable_alpha": {
    "variant": "delta_block_released",
    "gate": "scalar",
  },
  "delta-sigmoid_scalar": {"variant": "delta", "gate": "sigmoid"},
  "full_additive": {"variant": "full_additive"},
  "delta_replace": {"variant": "delta_replace"},
}


def load(name):
  """Returns (model config, {group: {name: array}}) of a golden file."""
  groups = {"param": {}, "grad": {}, "": {}}
  with safetensors.safe_open(GOLDEN / f"{name}.safetensors", "np") as file:
    hf = json.loads(file.metadata()["config"])
    num_blocks = int(file.metadata()["num_blocks"])
    for key in file.keys():  # noqa: SIM118 (not iterable)
      group, _, rest = key.rpartition("/") if "/" in key else ("", "", key)
      groups[group][rest] = file.get_tensor(key)
  config = ModelConfig(
    vocab_size=hf["vocab_size"],
    width=hf["hidden_size"],
    num_layers=hf["num_hidden_layers"],
    num_heads=hf["num_attention_heads"],
    num_kv_heads=hf["num_key_value_heads"],
    head_dim=hf["head_dim"],
    mlp_width=hf["intermediate_size"],
    norm_eps=hf["rms_norm_eps"],
    tie_embeddings=hf["tie_word_embeddings"],
    dtype="float32",
    routing=RoutingConfig(num_blocks=num_blocks, **ROUTING[name]),
  )
  return config, groups


def test_every_golden_file_is_covered():
  assert {path.stem for path in GOLDEN.glob("*.safetensors")} == set(ROUTING)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] * (name == "delta_block-null"))
    for name in ROUTING
  ],
)
def test_reproduces_the_released_model(name):
  config, golden = load(name)
  params = params_from_tensors(config, golden["param"])
  model = TransformerLM(config)
  tokens_BxT = golden[""]["input_ids"]

  @jax.jit
  def loss_and_logits(params):
    output = model.apply({"params": params}, tokens_BxT)
    sums = token_loss(
      output.hidden_BxTxD[:, :-1],
      output_head(config, params),
      tokens_BxT[:, 1:],
      jnp.ones_like(tokens_BxT[:, 1:], bool),
      tile_length=4,
    )
    return sums.loss / sums.tokens, output.logits_BxTxV

  (loss, logits), grads = jax.jit(
    jax.value_and_grad(loss_and_logits, has_aux=True)
  )(params)
  # Both sides are float32: 1e-5 of logits of size one.
  np.testing.assert_allclose(logits, golden[""]["logits"], atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(loss, golden[""]["loss"][0], rtol=1e-6)

  grads = tensors_from_params(config, grads)
  assert golden["grad"].keys() <= grads.keys()
  for key, grad in grads.items():
    # Parameters of reads that see no source have no gradient over there.
    expected = golden["grad"].get(key, np.zeros_like(grad))
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(
      grad, expected, atol=1e-4 * scale, rtol=0, err_msg=key
    )


@pytest.mark.parametrize("name", ROUTING)
def test_names_map_both_ways(name):
  config, golden = load(name)
  params = params_from_tensors(config, golden["param"])
  back = tensors_from_params(config, params)
  assert back.keys() == golden["param"].keys()
  for key, tensor in back.items():
    np.testing.assert_array_equal(tensor, golden["param"][key])
