"""Fine-tunes a model, or resumes it.

    python -m train.finetune configs/finetune_smollm2.py \\
        --init-from runs/routed --workdir runs/finetune

The model is a directory that `train.convert import` wrote, or any other model
directory, a run, or one of its checkpoints. The config is a recipe for any, and
`--freeze base` leaves all but the routing as it is (docs/pretrained.md).
"""

from deltajax.training.loop import train
from train.cli import main, parse_finetune, Run
from train.pretrain import print_report


def parse(arguments: list[str]) -> Run:
  """Parses the command line."""
  return parse_finetune("python -m train.finetune", arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Trains, then shows what came out."""
  run = parse(arguments)
  train(run.config, run.workdir, on_end=print_report)


if __name__ == "__main__":
  main(command)
