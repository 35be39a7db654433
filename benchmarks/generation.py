"""Speed of generation on this machine: prefill and decode, in tokens/s.

    python benchmarks/generation.py
    python benchmarks/generation.py --variants delta_block delta --json F

Every variant has random weights of a preset's shape. Where torch and
transformers are installed, transformers runs the weights of `standard` beside
them. The candidates take turns, a prompt or a few tokens each, so that a
machine whose speed drifts slows all of them. Ratios are medians over rounds,
relative to `standard`. The first token of a turn is not counted: what the
others leave in the processor's caches is not the candidate's.
"""

from collections.abc import Callable, Iterator
import dataclasses
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.common import random_params
from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.config import ConfigError, ModelConfig, RoutingConfig
from deltajax.models.generation import Generator
from deltajax.models.presets import presets
from deltajax.models.sampling import Sampling
from deltajax.models.transformer import TransformerLM
from train.cli import check_json_file, main, write_json_file

BASELINE = "standard"
TRANSFORMERS = "transformers"

# (prompts_BxP, number of tokens) -> greedy tokens_B, one at a time.
Steps = Callable[[np.ndarray, int], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    preset: of the shape.
    variants: compared with `standard`.
    layers: None for the preset's.
    vocab_size: None for the preset's.
    dtype: of activations and matrix products.
    batch_size: B.
    prompt_length: P, of the prefill that is timed.
    decode_from: tokens before the first that is decoded.
    tokens: decoded in a turn, the first of which is not counted.
    rounds: turns of each candidate at decoding.
    prefill_rounds: turns of each candidate at prefill.
    transformers: whether it runs too; None: where it is installed.
    json: also write the rows to this file.
  """

  preset: str = "smollm2-135m"
  variants: tuple[str, ...] = ("delta_block",)
  layers: int | None = None
  vocab_size: int | None = None
  dtype: str = "float32"
  batch_size: int = 1
  prompt_length: int = 512
  decode_from: int = 16
  tokens: int = 5
  rounds: int = 30
  prefill_rounds: int = 8
  transformers: bool | None = None
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """One candidate: tokens/s, and the ratio to `standard`.

  Attributes:
    name: a variant, or `transformers`.
    prefill: tokens of prompts per second, up to the first new token.
    prefill_ratio: median over rounds.
    prefill_best: in the best round.
    decode: median over rounds.
    decode_ratio: median over rounds.
    decode_best: in the best round.
    compile_seconds: first prefill and first decoded token.
    same_tokens: the share of the decoded tokens that are those of `standard`.
  """

  name: str
  prefill: float
  prefill_ratio: float
  prefill_best: float
  decode: float
  decode_ratio: float
  decode_best: float
  compile_seconds: float
  same_tokens: float


def model_config(options: Options, variant: str) -> ModelConfig:
  sizes = {"num_layers": options.layers, "vocab_size": options.vocab_size}
  return dataclasses.replace(
    presets[options.preset],
    dtype=options.dtype,
    routing=RoutingConfig(variant=variant),
    **{name: size for name, size in sizes.items() if size is not None},
  )


def our_steps(config: ModelConfig, params: Any) -> Steps:
  generator = Generator(TransformerLM(config), params)

  def steps(prompts_BxP, number):
    tokens = generator.steps(
      prompts_BxP, max_new_tokens=number, sampling=Sampling(temperature=0)
    )
    return map(np.asarray, tokens)

  return steps


def transformers_steps(config: ModelConfig, params: Any) -> Steps:
  import torch
  import transformers

  with tempfile.TemporaryDirectory() as directory:
    save_pretrained(directory, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=config.dtype
    )
  model.eval()

  @torch.inference_mode()
  def steps(prompts_BxP, number):
    tokens_BxT, past = torch.from_numpy(prompts_BxP), None
    for _ in range(number):
      found = model(
        tokens_BxT, past_key_values=past, use_cache=True, logits_to_keep=1
      )
      past = found.past_key_values
      tokens_BxT = found.logits[:, -1:].argmax(-1)
      yield tokens_BxT[:, 0].numpy()

  return steps


def timed(steps: Iterator[np.ndarray], number: int) -> tuple[float, list]:
  """Seconds, and the tokens, of `number` steps."""
  begin = time.perf_counter()
  tokens = [next(steps) for _ in range(number)]
  return time.perf_counter() - begin, tokens


def measure(options: Options, candidates: dict[str, Steps]) -> list[Row]:
  rng = np.random.default_rng(0)
  vocab_size = model_config(options, BASELINE).vocab_size
  shape = (options.batch_size, options.prompt_length)
  prompts = rng.integers(0, vocab_size, shape)
  beginnings = prompts[:, : options.decode_from]
  tokens = options.tokens * options.rounds + 2
  running, decoded, compiling = {}, {}, {}
  prefill: dict[str, list[float]] = {name: [] for name in candidates}
  decode: dict[str, list[float]] = {name: [] for name in candidates}
  for name, steps in candidates.items():
    begin = time.perf_counter()
    next(steps(prompts, 1))
    running[name] = steps(beginnings, tokens)
    decoded[name] = timed(running[name], 2)[1]
    compiling[name] = time.perf_counter() - begin
  for _ in range(options.prefill_rounds):
    for name, steps in candidates.items():
      next(steps(beginnings, 1))
      prefill[name].append(timed(steps(prompts, 1), 1)[0])
  for _ in range(options.rounds):
    for name, steps in running.items():
      decoded[name] += timed(steps, 1)[1]
      elapsed, new = timed(steps, options.tokens - 1)
      decode[name].append(elapsed / len(new))
      decoded[name] += new

  def ratio(times: dict[str, list[float]], name: str) -> float:
    pairs = zip(times[BASELINE], times[name], strict=True)
    return statistics.median(base / own for base, own in pairs)

  size = options.batch_size
  return [
    Row(
      name=name,
      prefill=prompts.size / statistics.median(prefill[name]),
      prefill_ratio=ratio(prefill, name),
      prefill_best=prompts.size / min(prefill[name]),
      decode=size / statistics.median(decode[name]),
      decode_ratio=ratio(decode, name),
      decode_best=size / min(decode[name]),
      compile_seconds=compiling[name],
      same_tokens=float(np.mean(np.equal(decoded[name], decoded[BASELINE]))),
    )
    for name in candidates
  ]


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  if options.tokens < 2:
    raise ConfigError(f"--tokens is {options.tokens}; give at least 2.")
  if options.decode_from > options.prompt_length:
    raise ConfigError(
      f"--decode-from {options.decode_from} is more than --prompt-length"
      f" {options.prompt_length}."
    )
  has_transformers = options.transformers
  if has_transformers is None:
    has_transformers = importlib.util.find_spec("transformers") is not None
  candidates: dict[str, Steps] = {}
  for variant in dict.fromkeys((BASELINE, *options.variants)):
    config = model_config(options, variant)
    params = random_params(config)
    candidates[variant] = our_steps(config, params)
    if variant == BASELINE and has_transformers:
      candidates[TRANSFORMERS] = transformers_steps(config, params)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  print(options)
  rows = measure(options, candidates)
  print(
    f"{'tokens/s':<22}{'prefill':>9}{'ratio':>7}{'best':>8}"
    f"{'decode':>9}{'ratio':>7}{'best':>8}{'compile s':>11}{'same tokens':>13}"
  )
  for row in rows:
    print(
      f"{row.name:<22}"
      f"{row.prefill:>9.1f}{row.prefill_ratio:>7.3f}{row.prefill_best:>8.1f}"
      f"{row.decode:>9.1f}{row.decode_ratio:>7.3f}{row.decode_best:>8.1f}"
      f"{row.compile_seconds:>11.1f}{row.same_tokens:>13.2f}"
    )
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
  main(command)
