"""Pretrains a model, or resumes it.

    python -m train.pretrain configs/quickstart.py --workdir runs/quickstart
    python -m train.pretrain configs/quickstart.py --workdir runs/longer \\
        --training.steps 2000 --model.routing.variant attnres_block

The same command goes on where a run ended, was preempted or killed. At the end
stand validation and test, a sample, and what the model routes
(docs/running.md).
"""

from collections.abc import Mapping

from deltajax.analysis.analyze import analyze
from deltajax.analysis.table import routing_table
from deltajax.models.texts import continue_text
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
  train(run.config, run.workdir, on_end=print_report)


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
  if result.test:
    lines.append(f"test:       {_quality(result.test, 'test')}")

  sample = continue_text(
    *(model, params, result.data.tokenizer, SAMPLE_PROMPT),
    max_new_tokens=SAMPLE_TOKENS,
  )
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


def _quality(values: Mapping[str, float], split: str = "validation") -> str:
  bits, perplexity = (
    values[f"{split}/{name}"] for name in ("bits_per_byte", "perplexity")
  )
  return f"{bits:.3f} bits per byte, perplexity {perplexity:.2f}"


if __name__ == "__main__":
  main(command)
