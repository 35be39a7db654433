"""How the next token is drawn from its logits.

Shapes: B batch, V vocabulary.
"""

import jax
import jax.numpy as jnp

from deltajax.routing.validation import ConfigError, typed_config


@typed_config
class Sampling:
  """How a token is drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_k: sample from the k most likely tokens. None: from all.
    top_p: sample from the fewest tokens that have this probability together,
      of those that top_k leaves.
    vocab_size: only ids below it are drawn: the tokenizer's size where the
      model's vocabulary is padded. None: the model's.

  Raises:
    ConfigError: for options out of range.

  References:
    top_p: nucleus sampling, arXiv 1904.09751.

  Examples:
    >>> Sampling(temperature=0.7, top_p=0.9).top_k is None
    True
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  vocab_size: int | None = None

  def __post_init__(self) -> None:
    if self.temperature < 0:
      raise ConfigError(
        f"temperature is {self.temperature}; it must be at least 0."
      )
    for name in ("top_k", "vocab_size"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1.")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1].")


def sample_token(
  logits_BxV: jax.Array, keys_B: jax.Array, sampling: Sampling
) -> jax.Array:
  """Draws one token per row, each with its own key."""
  logits_BxV = logits_BxV[:, : sampling.vocab_size]
  if sampling.temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  logits_BxV = logits_BxV / sampling.temperature
  draw = jax.vmap(jax.random.categorical)
  size = logits_BxV.shape[-1]
  top_p = 1.0 if sampling.top_p is None else sampling.top_p
  if sampling.top_k is None and top_p == 1:
    return draw(keys_B, logits_BxV).astype(jnp.int32)
  # In falling order: what is left is a prefix.
  ordered_BxV, ids_BxV = jax.lax.top_k(
    logits_BxV, min(sampling.top_k or size, size)
  )
  probabilities_BxV = jax.nn.softmax(ordered_BxV, axis=-1)
  before_BxV = jnp.cumsum(probabilities_BxV, axis=-1) - probabilities_BxV
  kept_BxV = (before_BxV < top_p).at[:, 0].set(True)
  drawn_B = draw(keys_B, jnp.where(kept_BxV, ordered_BxV, -jnp.inf))
  return jnp.take_along_axis(ids_BxV, drawn_B[:, None], 1)[:, 0]
