"""Generation says what the model says, whatever is cached and compiled."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltajax
from deltajax.models import generation
from deltajax.models.cache import LayerCache
from deltajax.models.generation import bucket, Generator
from deltajax.models.sampling import Sampling
from deltajax.routing.variants import VARIANTS
from tests.helpers import (
  EIGHT_DEVICES,
  logits_of,
  precision,
  random_params,
  run_module,
  tiny_config,
)

# A bucket is passed on the way: 5 + 14 > 16.
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8])
NEW_TOKENS = 14


@pytest.fixture(autouse=True)
def quick_compiles():
  """Programs compile faster, and run slower."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def small_config(variant="delta_block", **options):
  return tiny_config(
    variant, **{"num_layers": 4, "num_blocks": 2, "vocab_size": 23, **options}
  )


def continued(config, prompts, **options):
  """New tokens of a model with random parameters."""
  options = {"max_new_tokens": NEW_TOKENS, "temperature": 0, **options}
  with precision(config.dtype):
    return deltajax.generate(
      deltajax.TransformerLM(config), random_params(config), prompts, **options
    )


def most_likely(config, prompts, new):
  """What the model finds most likely at every new token, all of them given."""
  texts = [
    [*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)
  ]
  length = max(map(len, texts))
  padded = np.array([text + [0] * (length - len(text)) for text in texts])
  logits = logits_of(config, random_params(config), padded)
  return np.array(
    [
      logits[i, len(prompt) - 1 : len(text) - 1].argmax(-1)
      for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
  )


@pytest.mark.parametrize(
  "config",
  [
    *(pytest.param(small_config(variant), id=variant) for variant in VARIANTS),
    *(
      pytest.param(small_config(variant, **options), id=f"{variant}-{options}")
      for variant, options in (
        ("standard", {"qk_norm": False, "tie_embeddings": False}),
        ("standard", {"num_kv_heads": 4}),
        ("delta_block", {"heads": 2, "null_source": True}),
        ("rd_delta_block", {"key_dim": 8, "gate": "sigmoid"}),
        ("rd_attnres", {"heads": 2, "key_dim": 8, "null_source": True}),
        ("delta", {"gate": "scalar", "num_kv_heads": 1}),
        ("attnres_block", {"null_source": True, "tie_embeddings": False}),
      )
    ),
  ],
)
def test_greedy_equals_teacher_forced_argmax(config):
  new = continued(config, PROMPTS)
  np.testing.assert_array_equal(new, most_likely(config, PROMPTS, new))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_rows_do_not_know_of_each_other(options):
  config = small_config("rd_delta_block")
  key = jax.random.key(3)
  prompts = (list(range(1, 21)), [9], [4, 5, 6])
  together = continued(config, prompts, key=key, **options)
  alone = continued(config, prompts[:1], key=key, **options)
  np.testing.assert_array_equal(together[:1], alone)
  if not options:  # A row draws with its own key.
    for prompt, row in zip(prompts, together, strict=True):
      np.testing.assert_array_equal(row[None], continued(config, [prompt]))


@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_long_prompts_are_run_in_pieces(monkeypatch, length):
  monkeypatch.setattr(generation, "SMALLEST_BUCKET", 1)
  monkeypatch.setattr(generation, "PIECE", 8)
  config = small_config("rd_delta_block")
  prompts = [[*range(length % 23)] + [5] * (length - length % 23), [1, 2]]
  new = continued(config, prompts, max_new_tokens=4)
  np.testing.assert_array_equal(new, most_likely(config, prompts, new))


def test_an_array_of_prompts_is_a_list_of_rows():
  config = small_config()
  prompts = np.array([[1, 2, 3], [4, 5, 6]])
  np.testing.assert_array_equal(
    continued(config, jnp.asarray(prompts)), continued(config, list(prompts))
  )


def test_stop_tokens_end_rows_one_by_one():
  config = small_config()
  free = continued(config, PROMPTS)
  stop = int(free[0, 3])
  unused = next(i for i in range(23) if i not in free)
  assert stop not in free[1]
  stopped = continued(config, PROMPTS, stop_tokens=[stop, unused])
  first = free[0].tolist().index(stop)
  np.testing.assert_array_equal(stopped[1], free[1])
  np.testing.assert_array_equal(stopped[0, :first], free[0, :first])
  assert set(stopped[0, first:].tolist()) == {stop}
  # When all have stopped, nothing more is computed.
  with precision(config.dtype):
    generator = Generator(deltajax.TransformerLM(config), random_params(config))
    steps = generator.steps(
      PROMPTS[:1],
      max_new_tokens=NEW_TOKENS,
      sampling=Sampling(temperature=0),
      stop_tokens=[stop],
    )
    assert [int(token_B[0]) for token_B in steps] == list(free[0, : first + 1])
  alone = continued(config, PROMPTS[:1], stop_tokens=[stop])
  np.testing.assert_array_equal(alone, stopped[:1])


def test_sampling_is_seeded():
  config = small_config("standard")

  def sample(seed):
    return continued(config, PROMPTS, temperature=3.0, key=jax.random.key(seed))

  first = sample(0)
  np.testing.assert_array_equal(first, sample(0))
  assert np.any(first != sample(1))
  # Equal prompts are continued in different ways.
  twice = continued(
    config, [[1, 2]] * 2, temperature=3.0, key=jax.random.key(0)
  )
  assert np.any(twice[0] != twice[1])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"temperature": 1.0}, "needs a key"),
    ({"vocab_size": 24}, "vocab_size is 24; the model has 23 ids"),
    ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
    (
      {"stop_tokens": [3, 23]},
      r"stop_tokens are \[3, 23\]; the model has ids 0 to 22",
    ),
  ],
)
def test_bad_options(options, message):
  with pytest.raises(deltajax.ConfigError, match=message):
    continued(small_config(), [[1]], **options)


@pytest.mark.parametrize(
  ("prompts", "message"),
  [
    ([[1, 99]], "prompt ids run from 1 to 99; the model has ids 0 to 22"),
    ([[1], [-1]], "prompt ids run from -1 to 1"),
    ([[1, 2], []], r"prompt 1 has shape \(0,\)"),
    ([1, 2], r"prompt 0 has shape \(\)"),
    ([], "there is no prompt"),
    ([[0.5]], "prompt 0 has dtype float64; give token ids"),
  ],
)
def test_bad_prompts(prompts, message):
  with pytest.raises(deltajax.ConfigError, match=message):
    continued(small_config(), prompts)


def test_ids_beyond_the_tokenizer_are_not_drawn():
  new = continued(
    small_config("standard"),
    [[1]],
    max_new_tokens=50,
    temperature=100.0,
    key=jax.random.key(0),
    vocab_size=5,
  )
  assert new.max() == 4


def test_buckets():
  sizes = [bucket(n) for n in range(1, 4097)]
  assert sizes == sorted(sizes)
  assert all(
    n <= size <= max(1.25 * n, n + 15) for n, size in enumerate(sizes, 1)
  )
  assert len(set(sizes)) == 8 + 4 * 5  # up to 128, then 4 for each doubling
  assert all(bucket(size) == size for size in sizes)


def test_one_compile_for_each_bucket():
  programs = (
    generation._begin,
    generation._run_layer,
    generation._end,
    generation._empty_caches,
  )
  config = small_config("delta", norm_eps=0.125)  # of no other test

  def compiled():
    return [program._cache_size() for program in programs]

  continued(config, [[1, 2]], max_new_tokens=2)
  before = compiled()
  # Other lengths within a bucket, other seeds and other ways of sampling.
  continued(config, [list(range(1, 17))], max_new_tokens=16)
  continued(
    config,
    [[1]],
    max_new_tokens=3,
    top_k=2,
    temperature=1.0,
    key=jax.random.key(1),
    stop_tokens=[5],
  )
  assert compiled() == before
  # A longer text: the prompt's programs again, and the step's.
  continued(config, [list(range(1, 18))], max_new_tokens=16)
  more = [a - b for a, b in zip(compiled(), before, strict=True)]
  assert more == [2, 2, 1, 1]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_writes_the_cache_in_place(batch):
  jax.config.update("jax_disable_most_optimizations", False)
  config = small_config(dtype="float32", param_dtype="float32", head_dim=64)
  plan = generation._Plan(config, None)
  generator = Generator(deltajax.TransformerLM(config), random_params(config))
  around, [(params, step), *_] = generator._laid_out
  capacity = 4096
  state, context = jax.eval_shape(
    lambda params, tokens, first_B: generation._begin(
      plan, capacity, params, tokens, first_B, np.int32(5)
    ),
    around,
    np.zeros(batch, np.int32),
    np.zeros(batch, np.int32),
  )
  cache = jax.eval_shape(lambda: LayerCache.create(config, batch, capacity))
  lowered = generation._run_layer.lower(
    plan, params, step, state, cache, context
  )
  memory = lowered.compile().memory_analysis()
  cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes >= cache_bytes
  # Logits of all slots, their mask, and next to nothing else.
  assert memory.temp_size_in_bytes < cache_bytes / 8


def test_parameters_are_cast_once_except_for_routers():
  config = small_config(dtype="bfloat16", param_dtype="float32")
  params = random_params(config)
  generator = Generator(deltajax.TransformerLM(config), params)
  around, [_, (layer, _), *_] = generator._laid_out
  assert layer["attention_router"]["query"].dtype == jnp.float32
  assert layer["attention"]["query"]["kernel"].dtype == jnp.bfloat16
  assert around["embedding"].dtype == jnp.bfloat16
  steps = generator.steps(
    [[1, 2, 3]], max_new_tokens=2, sampling=Sampling(temperature=0)
  )
  new = np.array([token_B[0] for token_B in steps])
  logits = logits_of(config, params, np.array([[1, 2, 3, new[0]]]))[0, -2:]
  # Rounding may decide between tokens that are nearly as likely.
  assert np.all(logits[[0, 1], new] > logits.max(-1) - 0.1)


def test_parameters_may_lie_on_a_mesh():
  done = run_module("tests.models.generation_program", env=EIGHT_DEVICES)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {"devices": 8, "equal": True}
