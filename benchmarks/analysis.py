"""What it costs to look inside: a forward pass with and without its weights.

    python benchmarks/analysis.py
    python benchmarks/analysis.py --variants delta --width 512 --layers 12

CPU time of one batch, the best of some rounds, and temporary memory: `forward`
up to the logits; `weights` the same with the routing weights of every read;
`analysis` all sums of an analysis; `gradients` the norms of gradients. Ratios
are to `forward`.
"""

from collections.abc import Callable
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.common import random_batch, random_params
from deltajax.analysis.observe import Observer
from deltajax.config import ModelConfig, RoutingConfig
from deltajax.models.transformer import output_head, TransformerLM
from train.cli import main


@dataclasses.dataclass(frozen=True)
class Options:
  """A model; the defaults are those of the quickstart.

  Attributes:
    variants: of the routing.
    width: D.
    layers: L.
    batch_size: B.
    sequence_length: T.
    rounds: of which the best counts.
  """

  variants: tuple[str, ...] = ("delta_block", "delta", "rd_attnres")
  width: int = 128
  layers: int = 8
  batch_size: int = 8
  sequence_length: int = 128
  rounds: int = 9


def programs(options: Options, variant: str) -> dict[str, tuple[Callable, Any]]:
  """Jitted functions of (params, batch), with their arguments."""
  config = ModelConfig(
    vocab_size=259,
    width=options.width,
    num_layers=options.layers,
    num_heads=max(options.width // 64, 1),
    num_kv_heads=1,
    head_dim=64,
    mlp_width=2 * options.width,
    dtype="float32",
    routing=RoutingConfig(variant=variant, query_init_std=0.3),
  )
  length = options.sequence_length
  observer = Observer(config, length)
  model = TransformerLM(observer.config)
  params = random_params(config)
  batch = random_batch(config.vocab_size, options.batch_size, length)

  def forward(params, batch):
    inputs = {name: x[:, :-1] for name, x in batch.items()}
    tokens = inputs.pop("tokens")
    return model.apply({"params": params}, tokens, **inputs).logits_BxTxV

  def weights(params, batch):
    found = observer.run(params, batch)
    head_DxV = output_head(config, params)
    return found.hidden_BxTxD @ head_DxV, found.weights_LxRxHxNxBxT

  functions = {
    "forward": forward,
    "weights": weights,
    "analysis": observer.observe,
    "gradients": observer.gradient_sums,
  }
  return {
    name: (jax.jit(function), (params, batch))
    for name, function in functions.items()
  }


def command(arguments: list[str]) -> None:
  """Prints a row for each variant and program."""
  options = tyro.cli(Options, args=arguments)
  print(f"{'variant':<16}{'program':<12}{'CPU ms':>8}{'ratio':>7}{'MiB':>7}")
  for variant in options.variants:
    made = programs(options, variant)
    best = dict.fromkeys(made, float("inf"))
    for _ in range(options.rounds + 1):  # The first compiles.
      for name, (function, inputs) in made.items():
        start = time.process_time()
        jax.block_until_ready(function(*inputs))
        best[name] = min(best[name], time.process_time() - start)
    for name, (function, inputs) in made.items():
      memory = function.lower(*inputs).compile().memory_analysis()
      print(
        f"{variant:<16}{name:<12}{1e3 * best[name]:>8.1f}"
        f"{best[name] / best['forward']:>7.2f}"
        f"{memory.temp_size_in_bytes / 2**20:>7.0f}"
      )


if __name__ == "__main__":
  main(command)
