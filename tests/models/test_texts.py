"""A model with its tokenizer: text in, text out."""

import pytest

import deltajax
from deltajax import testing
from deltajax.data.tokenizers import get_tokenizer
from deltajax.models.texts import continue_text

CONFIG = testing.tiny_config(num_layers=1)


def added(**options):
  return continue_text(
    deltajax.TransformerLM(CONFIG),
    testing.random_params(CONFIG),
    get_tokenizer("bytes"),
    "def ",
    **options,
  )


def test_the_text_is_that_of_the_tokens():
  tokenizer = get_tokenizer("bytes")
  tokens = deltajax.generate(
    deltajax.TransformerLM(CONFIG),
    testing.random_params(CONFIG),
    tokenizer.encode("def ")[None],
    max_new_tokens=6,
    temperature=0,
    vocab_size=tokenizer.vocab_size,
  )[0]
  ends = [i for i, x in enumerate(tokens) if x in tokenizer.stop_ids]
  whole = tokens[: ends[0]] if ends else tokens
  text = added(max_new_tokens=6, temperature=0)
  assert text == tokenizer.decode(whole)
  assert text


def test_the_seed_decides():
  drawn = [
    added(max_new_tokens=6, temperature=100.0, seed=seed) for seed in (1, 1, 2)
  ]
  assert drawn[0] == drawn[1] != drawn[2]


def test_an_empty_prompt_is_refused():
  with pytest.raises(deltajax.ConfigError, match="prompt 0"):
    continue_text(
      deltajax.TransformerLM(CONFIG),
      testing.random_params(CONFIG),
      get_tokenizer("bytes"),
      "",
    )
