"""Requests/s of lm-eval: our model beside lm-eval's own of transformers.

    pip install '.[reference]'
    python benchmarks/lm_eval_requests.py
    python benchmarks/lm_eval_requests.py --requests 512 --rounds 9 --json F

Both run one model, of random weights and a preset's shape in miniature, on the
same requests of each kind: `choices` (four one-token answers to a question),
`words` (likelihoods of some words behind a text), `rolling` (whole texts) and
`generate`. They take turns, so that a machine whose speed drifts slows both.
Ratios are medians over rounds. The first turn of each compiles, and is told
apart. Both must find the same. Without torch, ours runs alone.
"""

from collections.abc import Callable
import dataclasses
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.common import random_params
from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.config import ModelConfig, RoutingConfig
from deltajax.data.tokenizers import get_tokenizer
from deltajax.evaluation.harness import HarnessLM
from deltajax.evaluation.tasks import check_lm_eval
from train.cli import check_json_file, main, write_json_file

VOCABULARY = 1000
MOST_DIFFERENT = 1e-3  # Of log-likelihoods that both find, relative.


@dataclasses.dataclass(frozen=True)
class Options:
  """A model and how much it is asked.

  Attributes:
    requests: of each kind; of `generate` a quarter.
    batch_size: rows at once, of both.
    context: tokens that the model sees.
    width: D.
    layers: L.
    new_tokens: of each text that is continued.
    rounds: turns of both, without the first.
    transformers: whether it runs too; None: where it is installed.
    json: also write the rows to this file.
  """

  requests: int = 256
  batch_size: int = 16
  context: int = 256
  width: int = 64
  layers: int = 4
  new_tokens: int = 16
  rounds: int = 5
  transformers: bool | None = None
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """One kind of request.

  Attributes:
    kind: its name.
    requests: in a turn.
    ours: requests/s, median over rounds.
    theirs: of lm-eval's own model; None if that did not run.
    ratio: ours over theirs, median over rounds.
    compile_seconds: our first turn.
    first_ratio: ours over theirs in the first turn.
  """

  kind: str
  requests: int
  ours: float
  theirs: float | None
  ratio: float | None
  compile_seconds: float
  first_ratio: float | None


class Request:
  """What a model of lm-eval is asked."""

  def __init__(self, *args: Any):
    """Takes what lm-eval gives."""
    self.args = args


def make_model(options: Options, directory: pathlib.Path) -> ModelConfig:
  """Writes a random model with a tokenizer of whole words."""
  from tokenizers import models, pre_tokenizers, Tokenizer

  config = ModelConfig(
    vocab_size=VOCABULARY,
    width=options.width,
    num_layers=options.layers,
    num_heads=options.width // 16,
    num_kv_heads=options.width // 32,
    head_dim=16,
    mlp_width=3 * options.width,
    routing=RoutingConfig(variant="standard"),
    dtype="float32",
    init_std=0.1,
  )
  save_pretrained(directory, config, random_params(config))
  names = ["<unk>", "<end>", *(f"w{i}" for i in range(2, VOCABULARY))]
  words = Tokenizer(
    models.WordLevel({x: i for i, x in enumerate(names)}, "<unk>")
  )
  words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  words.add_special_tokens(["<end>"])
  words.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(
    '{"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast",'
    ' "pad_token": "<end>"}'
  )
  return config


def make_requests(options: Options) -> dict[str, list[Request]]:
  """Requests of each kind, texts of lengths like those of benchmarks."""
  rng = np.random.default_rng(0)

  def text(least, most):
    ids = rng.integers(2, VOCABULARY, rng.integers(least, most))
    return " ".join(f"w{i}" for i in ids)

  size, longest = options.requests, options.context
  questions = [text(10, longest // 2) for _ in range(-(-size // 4))]
  generation = {"max_gen_toks": options.new_tokens, "until": ["<never>"]}
  return {
    "choices": [Request(x, f" w{i}") for x in questions for i in range(10, 14)][
      :size
    ],
    "words": [
      Request(text(10, longest // 2), " " + text(2, 20)) for _ in range(size)
    ],
    "rolling": [Request(text(longest // 4, 2 * longest)) for _ in range(size)],
    "generate": [
      Request(text(10, longest // 2), dict(generation))
      for _ in range(-(-size // 4))
    ],
  }


def their_model(options: Options, directory: pathlib.Path) -> Any:
  from lm_eval.models.huggingface import HFLM

  return HFLM(
    pretrained=str(directory),
    device="cpu",
    dtype="float32",
    batch_size=options.batch_size,
    max_length=options.context,
  )


METHODS: dict[str, Callable[[Any], Callable[..., list]]] = {
  "choices": lambda lm: lm.loglikelihood,
  "words": lambda lm: lm.loglikelihood,
  "rolling": lambda lm: lm.loglikelihood_rolling,
  "generate": lambda lm: lm.generate_until,
}


def check_same(kind: str, ours: list, theirs: list) -> None:
  """Raises unless both found the same."""
  if kind == "generate":
    same = np.mean([x == y for x, y in zip(ours, theirs, strict=True)])
    assert same > 0.9, f"{kind}: {same:.0%} of the texts are equal"
    return
  x, y = (np.array(found, np.float64) for found in (ours, theirs))
  np.testing.assert_allclose(x, y, rtol=MOST_DIFFERENT, err_msg=kind)


def measure(
  options: Options,
  kind: str,
  requests: list[Request],
  models: dict[str, Any],
) -> Row:
  rates: dict[str, list[float]] = {name: [] for name in models}
  for number in range(options.rounds + 1):
    found = {}
    for name, lm in models.items():
      begin = time.perf_counter()
      found[name] = METHODS[kind](lm)(requests, disable_tqdm=True)
      seconds = time.perf_counter() - begin
      rates[name].append(len(requests) / seconds)
    if len(found) > 1 and not number:
      check_same(kind, found["ours"], found["theirs"])
  ours, theirs = rates["ours"], rates.get("theirs")
  ratios = None
  if theirs is not None:
    ratios = [x / y for x, y in zip(ours, theirs, strict=True)]
  return Row(
    kind=kind,
    requests=len(requests),
    ours=statistics.median(ours[1:]),
    theirs=None if theirs is None else statistics.median(theirs[1:]),
    ratio=None if ratios is None else statistics.median(ratios[1:]),
    compile_seconds=len(requests) / ours[0],
    first_ratio=None if ratios is None else ratios[0],
  )


def command(arguments: list[str]) -> None:
  """Prints a row for each kind of request."""
  options = tyro.cli(Options, args=arguments)
  check_lm_eval()
  check_json_file(options.json)
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    config = make_model(options, directory)
    models = {
      "ours": HarnessLM(
        config,
        load_pretrained(directory).params,
        get_tokenizer(f"{directory}/"),
        context=options.context,
        batch_size=options.batch_size,
      )
    }
    beside = options.transformers
    if beside is None:
      beside = importlib.util.find_spec("torch") is not None
    if beside:
      models["theirs"] = their_model(options, directory)
    columns = ("ours/s", "theirs/s", "ratio", "first s", "first ratio")
    print(f"{'kind':<10}{'requests':>9}" + "".join(f"{x:>12}" for x in columns))
    rows = []
    for kind, requests in make_requests(options).items():
      row = measure(options, kind, requests, models)
      rows.append(row)
      numbers = [row.ours, row.theirs, row.ratio]
      numbers += [row.compile_seconds, row.first_ratio]
      print(
        f"{kind:<10}{row.requests:>9}"
        + "".join(
          "           -" if x is None else f"{x:>12.2f}" for x in numbers
        )
      )
  write_json_file(options.json, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
  main(command)
