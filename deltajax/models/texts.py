"""Text in, text out: a model with its tokenizer."""

from typing import Any

import jax

from deltajax.data.continuation import Continuation, continue_texts
from deltajax.data.tokenizers import Tokenizer
from deltajax.models.generation import Generator
from deltajax.models.sampling import Sampling
from deltajax.models.transformer import TransformerLM


def continue_text(
  model: TransformerLM,
  params: Any,
  tokenizer: Tokenizer,
  prompt: str,
  *,
  max_new_tokens: int = 200,
  temperature: float = 0.7,
  seed: int = 0,
) -> str:
  """Returns what a model adds to a text.

  It ends with a token that ends texts, or after `max_new_tokens`. `Generator`
  yields tokens as they come, of several texts.

  Args:
    model: the model.
    params: its unboxed parameters.
    tokenizer: of the model.
    prompt: at least one token of text.
    max_new_tokens: tokens that are added at most.
    temperature: divides the logits; 0 takes the most likely token.
    seed: of what is drawn.

  Raises:
    ConfigError: for options out of range, an empty prompt, and a tokenizer with
      more ids than the model.
  """
  steps = Generator(model, params).steps(
    [tokenizer.encode_prompt(prompt)],
    max_new_tokens=max_new_tokens,
    sampling=Sampling(temperature=temperature, vocab_size=tokenizer.vocab_size),
    key=jax.random.key(seed),
    stop_tokens=tokenizer.stop_ids,
  )
  texts = [Continuation(tokenizer, (), max_new_tokens)]
  return "".join(new for (new,) in continue_texts(steps, texts))
