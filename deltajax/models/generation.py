"""Sampling from a model.

Shapes: B batch, P prompt, T prompt and new tokens, V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deltajax.models.transformer import (
  output_head,
  output_logits,
  partitionable,
  TransformerLM,
)
from deltajax.routing.validation import ConfigError


def generate(
  model: TransformerLM,
  params: Any,
  prompt_tokens: jax.typing.ArrayLike,
  *,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  vocab_size: int | None = None,
) -> jax.Array:
  """Continues prompts; returns new tokens [B, max_new_tokens].

  Every token costs a forward pass over the whole text, in plain XLA whatever
  the config says: see `partitionable`.

  Args:
    model: the model.
    params: its unboxed parameters.
    prompt_tokens: [B, P], at least one token each.
    max_new_tokens: how many tokens are added.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: sample from the k most likely tokens. None: from all.
    top_p: sample from the fewest tokens that have this probability together.
    key: random key; needed unless temperature is 0.
    vocab_size: only ids below it are drawn: the tokenizer's size where the
      model's vocabulary is padded. None: the model's.

  Raises:
    ConfigError: for options out of range, or prompts outside the vocabulary.
  """
  prompt_tokens = jnp.asarray(prompt_tokens, jnp.int32)
  if prompt_tokens.ndim != 2 or prompt_tokens.shape[1] < 1:
    raise ConfigError(
      f"prompt_tokens have shape {prompt_tokens.shape}; give [B, P], P >= 1."
    )
  if max_new_tokens < 1:
    raise ConfigError(f"max_new_tokens is {max_new_tokens}; at least 1.")
  if temperature < 0:
    raise ConfigError(f"temperature is {temperature}; it must be at least 0.")
  if top_k is not None and top_k < 1:
    raise ConfigError(f"top_k is {top_k}; it must be at least 1.")
  if top_p is not None and not 0 < top_p <= 1:
    raise ConfigError(f"top_p is {top_p}; it must be in (0, 1].")
  if key is None:
    if temperature > 0:
      raise ConfigError("sampling needs a key; temperature=0 does not.")
    key = jax.random.key(0)
  size = model.config.vocab_size
  vocab_size = size if vocab_size is None else vocab_size
  if not 0 < vocab_size <= size:
    raise ConfigError(f"vocab_size is {vocab_size}; the model has {size} ids.")
  least, most = int(prompt_tokens.min()), int(prompt_tokens.max())
  if least < 0 or most >= size:
    raise ConfigError(
      f"prompt ids run from {least} to {most}; the model has ids 0 to"
      f" {size - 1}."
    )
  model = TransformerLM(partitionable(model.config))
  options = _Options(max_new_tokens, temperature, top_k, top_p, vocab_size)
  return _generate(model, options, params, prompt_tokens, key)


class _Options(NamedTuple):
  """What a compiled generation depends on."""

  max_new_tokens: int
  temperature: float
  top_k: int | None
  top_p: float | None
  vocab_size: int


@partial(jax.jit, static_argnums=(0, 1))
def _generate(model, options, params, prompt_BxP, key):
  max_new_tokens = options.max_new_tokens
  prompt_length = prompt_BxP.shape[1]
  # Causal attention never looks at what is not written yet.
  text_BxT = jnp.pad(prompt_BxP, ((0, 0), (0, max_new_tokens)))

  def add_token(text_BxT, inputs):
    position, key = inputs
    hidden_BxTxD = model.apply({"params": params}, text_BxT, method="hidden")
    logits_BxV = output_logits(
      hidden_BxTxD[:, position - 1], output_head(model.config, params)
    )
    token_B = sample_token(
      logits_BxV[:, : options.vocab_size],
      key,
      temperature=options.temperature,
      top_k=options.top_k,
      top_p=options.top_p,
    )
    return text_BxT.at[:, position].set(token_B), None

  positions = prompt_length + jnp.arange(max_new_tokens)
  keys = jax.random.split(key, max_new_tokens)
  text_BxT, _ = jax.lax.scan(add_token, text_BxT, (positions, keys))
  return text_BxT[:, prompt_length:]


def sample_token(
  logits_BxV: jax.Array,
  key: jax.Array,
  *,
  temperature: float,
  top_k: int | None,
  top_p: float | None,
) -> jax.Array:
  """Draws one token per row; see `generate` for the options."""
  if temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  logits_BxV = logits_BxV / temperature
  if top_k is not None and top_k < logits_BxV.shape[-1]:
    least = jax.lax.top_k(logits_BxV, top_k)[0][:, -1:]
    logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
  if top_p is not None and top_p < 1:
    ordered = jnp.sort(logits_BxV, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.sum(before < top_p, axis=-1, keepdims=True)
    least = jnp.take_along_axis(ordered, kept - 1, axis=-1)
    logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
  return jax.random.categorical(key, logits_BxV).astype(jnp.int32)
