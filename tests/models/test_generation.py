from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltajax
from deltajax.models.generation import sample_token
from deltajax.routing.variants import VARIANTS


def tiny(variant):
  config = deltajax.ModelConfig(
    vocab_size=23,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    dtype="float32",
    init_std=0.5,
    routing=deltajax.RoutingConfig(variant=variant, num_blocks=2),
  )
  model = deltajax.TransformerLM(config)
  init = jax.jit(model.init)
  variables = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  return model, nn.meta.unbox(variables)["params"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_teacher_forced_argmax(variant):
  model, params = tiny(variant)
  prompts = jnp.array([[1, 2, 3], [4, 5, 6]])
  new = deltajax.generate(
    model, params, prompts, max_new_tokens=6, temperature=0
  )
  text = jnp.concatenate([prompts, new], axis=1)
  logits = jax.jit(model.apply)({"params": params}, text).logits_BxTxV
  np.testing.assert_array_equal(new, logits[:, 2:-1].argmax(-1))


def test_sampling_is_seeded():
  model, params = tiny("standard")
  prompts = jnp.array([[1, 2, 3]])

  def sample(seed):
    return deltajax.generate(
      model, params, prompts, max_new_tokens=12, key=jax.random.key(seed)
    )

  np.testing.assert_array_equal(sample(0), sample(0))
  assert np.any(sample(0) != sample(1))


LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))


@pytest.mark.parametrize(
  ("options", "allowed"),
  [
    ({}, {0, 1, 2, 3}),
    ({"top_k": 2}, {0, 1}),
    ({"top_k": 9}, {0, 1, 2, 3}),
    ({"top_p": 0.6}, {0, 1}),
    ({"top_p": 0.4}, {0}),
    ({"top_p": 1.0}, {0, 1, 2, 3}),
    ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
    ({"temperature": 0.0}, {0}),
  ],
)
def test_only_likely_tokens_are_drawn(options, allowed):
  options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
  draws = {
    int(sample_token(LOGITS, jax.random.key(seed), **options)[0])
    for seed in range(200)
  }
  assert draws == allowed


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"key": None}, "needs a key"),
    ({"vocab_size": 24}, "vocab_size is 24; the model has 23 ids"),
  ],
)
def test_bad_options(options, message):
  model, params = tiny("standard")
  options = {"max_new_tokens": 1, "key": jax.random.key(0), **options}
  with pytest.raises(deltajax.ConfigError, match=message):
    deltajax.generate(model, params, jnp.array([[1]]), **options)


def test_ids_beyond_the_tokenizer_are_not_drawn():
  model, params = tiny("standard")
  new = deltajax.generate(
    model,
    params,
    jnp.array([[1]]),
    max_new_tokens=50,
    temperature=100.0,
    key=jax.random.key(0),
    vocab_size=5,
  )
  assert new.max() == 4


def test_prompts_outside_the_vocabulary_are_refused():
  model, params = tiny("standard")
  with pytest.raises(deltajax.ConfigError, match="run from 1 to 99"):
    deltajax.generate(
      model, params, jnp.array([[1, 99]]), max_new_tokens=1, temperature=0
    )


def test_the_same_options_compile_once():
  from deltajax.models.generation import _generate

  model, params = tiny("delta")
  before = _generate._cache_size()
  for seed in range(3):
    deltajax.generate(
      model,
      params,
      jnp.array([[1, 2]]),
      max_new_tokens=2,
      top_k=3,
      key=jax.random.key(seed),
    )
  assert _generate._cache_size() == before + 1
