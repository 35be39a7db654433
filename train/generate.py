"""Continues texts with a trained model.

    python -m train.generate runs/quickstart --prompt "def "
    python -m train.generate DIR --prompt "The capital of France is" \\
        --temperature 0

Text is printed as it comes; with several prompts the first, and the others when
all have ended. A run names its tokenizer; a model directory holds a
tokenizer.json.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import sys
from typing import Annotated

import jax
import numpy as np
import tyro

from deltajax.config import ConfigError
from deltajax.data.continuation import Continuation, continue_texts
from deltajax.data.tokenizers import (
  check_vocabulary,
  get_tokenizer,
  Tokenizer,
)
from deltajax.models.generation import Generator
from deltajax.models.sampling import Sampling
from deltajax.models.transformer import TransformerLM
from deltajax.training.dtypes import check_dtype, dtype_here
from deltajax.training.load import find_model
from train.cli import main
from train.options import about_of, parse_options

Texts = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
SEPARATOR = "\n---"


@dataclasses.dataclass(frozen=True)
class Options:
  """Continues texts with a trained model.

  Attributes:
    source: a run, one of its checkpoints, or a model directory.
    prompt: a text to be continued; may be given more than once.
    prompt_file: a file that holds one more prompt.
    max_new_tokens: tokens that are added at most. A text ends where the context
      that the model was trained with is full.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: draw from the k most likely tokens.
    top_p: draw from the fewest tokens that have this probability together.
    seed: of what is drawn.
    stop: a text at which to stop, itself not printed; may be given more than
      once. Tokens that end a text always stop it.
    tokenizer: `bytes`, or the path of a tokenizer.json; None: the source's own.
    dtype: of activations and matrix products; None: float32 on a CPU, and
      elsewhere the model's.
  """

  source: tyro.conf.Positional[
    Annotated[pathlib.Path, tyro.conf.arg(metavar="RUN_OR_DIR")]
  ]
  prompt: Texts = ()
  prompt_file: pathlib.Path | None = None
  max_new_tokens: int = 200
  temperature: float = 0.7
  top_k: int | None = None
  top_p: float | None = None
  seed: int = 0
  stop: Texts = ()
  tokenizer: str | None = None
  dtype: str | None = None

  def prompts(self) -> list[str]:
    """All prompts.

    Raises:
      ConfigError: if there is none, or the file cannot be read.
    """
    found = list(self.prompt)
    if self.prompt_file is not None:
      try:
        found.append(self.prompt_file.read_text(encoding="utf-8"))
      except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
          f"--prompt-file {self.prompt_file} cannot be read: {reason}."
        ) from None
    if not found:
      raise ConfigError("there is no prompt; give --prompt or --prompt-file.")
    if "" in self.stop:
      raise ConfigError("--stop is empty; every text would end at once.")
    return found


def encode_prompts(
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  vocab_size: int,
  context: int | None,
) -> list[np.ndarray]:
  """Ids of the prompts.

  Raises:
    ConfigError: if the tokenizer is larger than the model's vocabulary, or a
      prompt is empty or leaves no room in the context.
  """
  check_vocabulary(tokenizer, vocab_size, "the vocabulary of the model")
  rows = [tokenizer.encode_prompt(text) for text in prompts]
  for i, row in enumerate(rows, 1):
    if not len(row):
      raise ConfigError(
        f"prompt {i} is empty; it must have at least one token."
      )
    if context is not None and len(row) >= context:
      raise ConfigError(
        f"prompt {i} has {len(row)} tokens; the model sees {context}, so that a"
        f" prompt can have {context - 1}."
      )
  return rows


def parse(arguments: list[str]) -> Options:
  """Parses the command line."""
  usage = (
    "python -m train.generate  RUN_OR_DIR --prompt TEXT [--temperature T ...]"
  )
  return parse_options(
    *(Options, usage, arguments),
    about=about_of(__doc__),
    repeatable=("--prompt", "--stop"),
  )


def command(arguments: list[str]) -> None:
  """Prints prompts and how they go on."""
  options = parse(arguments)
  prompts = options.prompts()
  sampling = Sampling(
    temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
  )
  source = find_model(options.source)
  config = source.config()
  dtype = dtype_here(options.dtype)
  if dtype is not None:
    config = dataclasses.replace(config, dtype=dtype)
  check_dtype(config.dtype)
  tokenizer = get_tokenizer(options.tokenizer or source.tokenizer)
  context = source.context
  rows = encode_prompts(tokenizer, prompts, config.vocab_size, context)
  room = [
    min(options.max_new_tokens, (context or sys.maxsize) - len(row))
    for row in rows
  ]
  generator = Generator(TransformerLM(config), source.load().params)
  steps = generator.steps(
    rows,
    max_new_tokens=max(room),
    sampling=dataclasses.replace(sampling, vocab_size=tokenizer.vocab_size),
    key=jax.random.key(options.seed),
    stop_tokens=tokenizer.stop_ids,
  )
  continuations = [Continuation(tokenizer, options.stop, n) for n in room]
  print_texts(prompts, continue_texts(steps, continuations))


def print_texts(prompts: Sequence[str], news: Iterator[list[str]]) -> None:
  """Prints texts in order, the first of them as it comes."""
  print(prompts[0], end="", flush=True)
  others = list(prompts[1:])
  for first, *rest in news:
    print(first, end="", flush=True)
    others = [old + new for old, new in zip(others, rest, strict=True)]
  print("".join(f"{SEPARATOR}\n{text}" for text in others))


if __name__ == "__main__":
  main(command, resumes=False)
