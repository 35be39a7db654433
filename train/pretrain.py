"""Pretrains a model, or resumes it.

    python -m train.pretrain configs/quickstart.py --workdir runs/quickstart
    python -m train.pretrain configs/quickstart.py --workdir runs/longer \\
        --training.steps 2000 --model.routing.variant attnres_block

The same command goes on where a run ended, was preempted or killed. At the end
stand validation and test, a sample, and what the model routes
(docs/running.md).
"""

from collections.abc import Mapping

import jax
import numpy as np

from deltajax.analysis.analyze import analyze
from deltajax.analysis.table import routing_table
from deltajax.config import ConfigError, DataConfig
from deltajax.data.pipeline import fixed_batches, load_mixture, Mixture
from deltajax.evaluation.perplexity import score_rows
from deltajax.evaluation.scoring import Scorer
from deltajax.models.generation import generate
from deltajax.training import hosts
from deltajax.training.loop import RunResult, train
from train.cli import main, parse_run, Run

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200


def parse(arguments: list[str]) -> Run:
  """Parses the command line."""
  return parse_run("python -m train.pretrain", arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Trains, then shows what came out."""
  run = parse(arguments)
  print_report(train(run.config, run.workdir))


def print_report(result: RunResult) -> None:
  """Prints validation, test, a sample, the routing and where everything lies.

  All hosts must call it, since all hold parameters; one prints.
  """
  lines = report_lines(result)
  if hosts.is_main_host():
    print("\n".join(lines))


def report_lines(result: RunResult) -> list[str]:
  """What `print_report` prints."""
  model, params = result.trainer.model, result.state.params
  lines = [""]
  if result.before is not None:
    lines.append(f"validation: {_quality(result.before)} before")
  lines.append(
    f"validation: {_quality(result.validation)} after {result.step} updates"
  )
  lines += test_lines(result)

  tokenizer = result.data.tokenizer
  prompt = tokenizer.encode(SAMPLE_PROMPT)[None]
  tokens = generate(
    model,
    params,
    prompt,
    max_new_tokens=SAMPLE_TOKENS,
    temperature=0.7,
    key=jax.random.key(0),
    vocab_size=tokenizer.vocab_size,
  )
  sample = tokenizer.decode(tokens[0])
  lines += ["\nsample:", SAMPLE_PROMPT + sample]

  batch = {name: x[:4] for name, x in result.data.validation[0].items()}
  routing = analyze(
    model.config,
    params,
    [batch],
    sequence_length=batch["tokens"].shape[1] - 1,
    gradients=False,
  )
  if routing.reads:
    lines.append(
      "\nrouting: mean of the largest weight, beside the uniform value"
    )
    lines.append(routing_table(routing.reads))

  directory = result.directory
  return [
    *lines,
    f"\nconfig       {directory.config}",
    f"metrics      {directory.metrics}",
    f"tensorboard  {directory.tensorboard}",
    f"checkpoints  {directory.checkpoints}",
  ]


def test_lines(result: RunResult) -> list[str]:
  """How the model does on text that nothing was chosen by, if there is any.

  As many rows as in validation, of the split `test` of the run's data.
  """
  config = result.trainer.config
  # It may have to be packed yet.
  test = hosts.main_host_first(lambda: _test_split(config.data))
  if test is None:
    return []
  batches = fixed_batches(
    test,
    batch_size=len(result.data.validation[0]["tokens"]),
    num_rows=config.training.eval_sequences,
  )
  quality = score_rows(
    Scorer(config.model, result.trainer.sharding),
    result.state.params,
    batches,
    np.asarray(result.data.tokenizer.bytes_per_token),
  )
  return [
    f"test:       {quality.bits_per_byte} bits per byte, perplexity"
    f" {quality.perplexity}, over {quality.units} of {len(test)} rows"
  ]


def _test_split(data: DataConfig) -> Mixture | None:
  """None if there is no such split, or less than a row of it."""
  try:
    return load_mixture(data, "test")
  except ConfigError:
    return None


def _quality(validation: Mapping[str, float]) -> str:
  bits = validation["validation/bits_per_byte"]
  perplexity = validation["validation/perplexity"]
  return f"{bits:.3f} bits per byte, perplexity {perplexity:.2f}"


if __name__ == "__main__":
  main(command)
