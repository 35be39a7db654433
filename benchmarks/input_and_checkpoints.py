"""What data and checkpoints cost a run: the quickstart's, measured in one run.

    python benchmarks/input_and_checkpoints.py
    python benchmarks/input_and_checkpoints.py --steps 200 --json F

Trains the quickstart's model with a checkpoint every 50 updates, and prints the
share of time in which the loop waited for its batch, the share for which
checkpoints held it up, and the tokens/s that the pipeline alone gives on one
thread, as a multiple of those of the training step. Bounds: 1%, 5%, 20 times.
"""

import dataclasses
import pathlib
import sys
import tempfile
import time

import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.config import RunConfig
from deltajax.data.pipeline import train_iterator
from deltajax.training.loop import train
from deltajax.training.metrics import read_metrics
from deltajax.training.run_data import load_data
from train.cli import check_json_file, load_config, main, write_json_file


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured.

  Attributes:
    steps: updates of the run.
    checkpoint_every: updates between checkpoints.
    batches: that the pipeline alone makes.
    dataset: that is read, see `--data.dataset`.
    data_dir: where it is kept.
    json: also write the figures to this file.
  """

  steps: int = 300
  checkpoint_every: int = 50
  batches: int = 2000
  dataset: str = "python_stdlib"
  data_dir: str = "data"
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Figures:
  """Shares and ratios.

  Attributes:
    step_tokens: tokens/s of the training step.
    data_wait: share of that time spent waiting for a batch.
    checkpoint_share: time that checkpoints held the run up, over that of the
      updates between them.
    pipeline_tokens: tokens/s of the pipeline alone, on one thread.
    pipeline_ratio: of the two.
  """

  step_tokens: float
  data_wait: float
  checkpoint_share: float
  pipeline_tokens: float
  pipeline_ratio: float


def measure(options: Options, config: RunConfig) -> Figures:
  """Runs both."""
  with tempfile.TemporaryDirectory() as directory:
    workdir = pathlib.Path(directory) / "run"
    train(config, workdir, lambda line: None)
    lines = read_metrics(workdir / "metrics.jsonl")
  # The first window compiles; the last checkpoint is waited for.
  steps = [x for x in lines if "train/tokens_per_second" in x][1:]
  rates = np.array([x["train/tokens_per_second"] for x in steps])
  step_tokens = float(np.median(rates))
  saves = [x for x in lines if "checkpoint/blocked_seconds" in x]
  blocked = [
    x["checkpoint/blocked_seconds"]
    for x in saves
    if x["step"] < config.training.steps
  ]
  tokens = config.training.batch_size * config.data.sequence_length
  interval = options.checkpoint_every * tokens / step_tokens
  pipeline_tokens = pipeline_rate(options, config)
  return Figures(
    step_tokens=step_tokens,
    data_wait=float(np.mean([x["train/data_wait"] for x in steps])),
    checkpoint_share=float(np.mean(blocked)) / interval,
    pipeline_tokens=pipeline_tokens,
    pipeline_ratio=pipeline_tokens / step_tokens,
  )


def pipeline_rate(options: Options, config: RunConfig) -> float:
  """Tokens/s of batches that are made one after the other."""
  batches = train_iterator(
    load_data(config).train,
    batch_size=config.training.batch_size,
    seed=config.training.seed,
    num_threads=0,
  )
  next(batches)
  begin = time.perf_counter()
  for _ in range(options.batches):
    next(batches)
  seconds = time.perf_counter() - begin
  rows = options.batches * config.training.batch_size
  return rows * config.data.sequence_length / seconds


def command(arguments: list[str]) -> None:
  """Measures and prints."""
  options = tyro.cli(Options, args=arguments, description=__doc__)
  check_json_file(options.json)
  config = load_config("configs/quickstart.py")
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(
      config.data, dataset=options.dataset, data_dir=options.data_dir
    ),
    optimizer=dataclasses.replace(config.optimizer, warmup_steps=0),
    training=dataclasses.replace(
      config.training,
      steps=options.steps,
      log_every=max(1, options.checkpoint_every // 5),
      checkpoint_every=options.checkpoint_every,
      eval_every=options.steps,
      eval_sequences=8,
    ),
  )
  found = measure(options, config)
  print(
    f"step       {found.step_tokens:,.0f} tokens/s\n"
    f"data wait  {found.data_wait:.2%} of the time (bound 1%)\n"
    f"saving     {found.checkpoint_share:.2%} of the time (bound 5%), once in"
    f" {options.checkpoint_every} updates\n"
    f"pipeline   {found.pipeline_tokens:,.0f} tokens/s on one thread,"
    f" {found.pipeline_ratio:.1f} times the step (bound 20)"
  )
  write_json_file(options.json, dataclasses.asdict(found))


if __name__ == "__main__":
  main(command)
