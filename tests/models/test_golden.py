"""The authors' released model, reproduced: logits, loss and every gradient.

The reference values come from outside (tests/testdata/golden/README.md).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.checkpoints.names import tensor_places
from deltajax.config import RoutingConfig
from deltajax.models.transformer import output_head, TransformerLM
from deltajax.training.loss import token_loss
from tests import golden
from tests.helpers import assert_trees_equal

ROUTING = {
  "baseline": {"variant": "standard", "num_blocks": 4},
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


def test_every_golden_file_is_covered():
  assert sorted(ROUTING) == golden.NAMES


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] * (name == "delta_block-null"))
    for name in ROUTING
  ],
)
def test_reproduces_the_released_model(name, tmp_path):
  config, params = load_pretrained(golden.write_directory(name, tmp_path))
  assert config.routing == RoutingConfig(**{"num_blocks": 2} | ROUTING[name])
  config = dataclasses.replace(config, dtype="float32")
  model = TransformerLM(config)
  groups = golden.load(name)
  tokens_BxT = groups[""]["input_ids"]

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
  np.testing.assert_allclose(logits, groups[""]["logits"], atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(loss, groups[""]["loss"][0], rtol=1e-6)

  places = tensor_places(config)
  assert groups["grad"].keys() <= places.keys()
  for key, place in places.items():
    grad = place.read(grads)
    # Parameters of reads that see no source have no gradient over there.
    expected = groups["grad"].get(key, np.zeros_like(grad))
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(
      grad, expected, atol=1e-4 * scale, rtol=0, err_msg=key
    )


@pytest.mark.parametrize("name", ROUTING)
def test_an_export_is_the_released_directory_again(name, tmp_path):
  pretrained = load_pretrained(golden.write_directory(name, tmp_path / "in"))
  save_pretrained(tmp_path / "out", *pretrained)
  again = load_pretrained(tmp_path / "out")
  assert again.config == pretrained.config
  assert_trees_equal(again.params, pretrained.params)
  written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  expected = golden.load(name)["param"]
  assert written.keys() == expected.keys()
  for key, tensor in written.items():
    np.testing.assert_array_equal(tensor, expected[key], err_msg=key)
