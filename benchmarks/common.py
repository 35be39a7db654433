"""What several benchmarks run on."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from deltajax.config import ModelConfig
from deltajax.models.transformer import TransformerLM


def random_batch(
  vocab_size: int, batch_size: int, sequence_length: int
) -> dict[str, np.ndarray]:
  """Rows of T + 1 random tokens, each of one document, always the same.

  Args:
    vocab_size: V.
    batch_size: B.
    sequence_length: T.

  Returns:
    `tokens`, `segment_ids` and `positions`, int32 [B, T + 1].
  """
  shape = (batch_size, sequence_length + 1)
  rng = np.random.default_rng(0)
  return {
    "tokens": rng.integers(0, vocab_size, shape, np.int32),
    "segment_ids": np.ones(shape, np.int32),
    "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
  }


def random_params(config: ModelConfig) -> Any:
  """Initial parameters of a model, unboxed."""
  variables = jax.jit(TransformerLM(config).init)(
    jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )
  return nn.meta.unbox(variables)["params"]
