"""Tokens are drawn as often as they are likely, from those that are allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.models.sampling import sample_token, Sampling

LOGITS = jnp.log(jnp.array([[0.3, 0.5, 0.05, 0.15]]))


@pytest.mark.parametrize(
  ("options", "allowed"),
  [
    ({}, {0, 1, 2, 3}),
    ({"top_k": 2}, {0, 1}),
    ({"top_k": 9}, {0, 1, 2, 3}),
    ({"top_p": 0.6}, {0, 1}),
    ({"top_p": 0.4}, {1}),
    ({"top_p": 1e-9}, {1}),
    ({"top_p": 1.0}, {0, 1, 2, 3}),
    ({"top_k": 3, "top_p": 0.9}, {0, 1, 3}),
    ({"vocab_size": 3, "top_p": 0.99}, {0, 1, 2}),
    ({"vocab_size": 1}, {0}),
    ({"temperature": 0.0}, {1}),
  ],
)
def test_only_likely_tokens_are_drawn(options, allowed):
  keys = jax.random.split(jax.random.key(0), 400)
  logits = jnp.repeat(LOGITS, len(keys), axis=0)
  draws = sample_token(logits, keys, Sampling(**options))
  assert set(draws.tolist()) == allowed


def test_equal_logits_are_not_all_kept_by_top_k():
  keys = jax.random.split(jax.random.key(0), 100)
  draws = sample_token(jnp.zeros((100, 5)), keys, Sampling(top_k=2))
  assert len(set(draws.tolist())) == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
  keys = jax.random.split(jax.random.key(0), 4000)
  draws = sample_token(
    jnp.repeat(LOGITS, len(keys), axis=0),
    keys,
    Sampling(temperature=temperature),
  )
  found = np.bincount(draws, minlength=4) / len(keys)
  expected = jax.nn.softmax(LOGITS[0] / temperature)
  np.testing.assert_allclose(found, expected, atol=0.03)
