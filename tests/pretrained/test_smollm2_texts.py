"""What SmolLM2 of `make smollm2` says: run by `make test-pretrained`."""

import dataclasses

import numpy as np
import pytest

import deltajax
from deltajax.data.tokenizers import get_tokenizer
from tests.checkpoints.test_transformers import transformers_model
from tests.pretrained.test_smollm2 import SMOLLM2
from train import generate

pytestmark = pytest.mark.pretrained

PROMPTS = (
  "The capital of France is",
  "One, two, three,",
  "def fibonacci(n):\n",
  "naïve 日本 €",
)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def reference():
  """Ids of each prompt and its greedy continuation, both of transformers."""
  import torch
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
  model = transformers_model(SMOLLM2)
  rows = [tokenizer(text).input_ids for text in PROMPTS]
  found = [
    model.generate(
      torch.tensor([row]),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
      eos_token_id=None,
    )[0, len(row) :].tolist()
    for row in rows
  ]
  return rows, found


def test_prompts_are_encoded_as_transformers_does(reference):
  tokenizer = get_tokenizer(f"{SMOLLM2}/")
  found = [tokenizer.encode_prompt(text).tolist() for text in PROMPTS]
  assert found == reference[0]
  for text, ids in zip(PROMPTS, found, strict=True):
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("variant", ["standard", "delta_block"])
def test_greedy_texts_are_those_of_transformers(variant, reference):
  routing = None
  if variant != "standard":
    routing = deltajax.RoutingConfig(variant=variant, gate="scalar")
  config, params = deltajax.load_pretrained(SMOLLM2, routing)
  model = deltajax.TransformerLM(dataclasses.replace(config, dtype="float32"))
  rows, expected = reference
  new = deltajax.generate(
    model, params, rows, max_new_tokens=NEW_TOKENS, temperature=0
  )
  np.testing.assert_array_equal(new, expected)


def test_the_capital_of_france(capsys):
  generate.command(
    [
      *(str(SMOLLM2), "--prompt", PROMPTS[0], "--temperature", "0"),
      *("--max-new-tokens", "8", "--stop", "\n"),
    ]
  )
  assert capsys.readouterr().out == "The capital of France is Paris.\n"
