"""Greedy texts equal those of transformers, token for token.

See tests/testdata/generation/make_references.py.
"""

import json
import pathlib

from flax import traverse_util
import numpy as np
import pytest
from safetensors import safe_open

import deltajax

DIRECTORY = pathlib.Path(__file__).parents[1] / "testdata" / "generation"


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_greedy_texts_equal_those_of_transformers(name):
  with safe_open(DIRECTORY / f"{name}.safetensors", "numpy") as file:
    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    values = json.loads(file.metadata()["config"])
  config = deltajax.ModelConfig(
    **values,
    dtype="float32",
    routing=deltajax.RoutingConfig(variant="standard"),
  )
  expected = tensors.pop("new_tokens")
  prompts = [tensors.pop(f"prompt_{i}") for i in range(len(expected))]
  assert len({len(prompt) for prompt in prompts}) == len(prompts) == 3
  params = traverse_util.unflatten_dict(tensors, sep="/")
  new = deltajax.generate(
    deltajax.TransformerLM(config),
    params,
    prompts,
    max_new_tokens=expected.shape[1],
    temperature=0,
  )
  np.testing.assert_array_equal(new, expected)
