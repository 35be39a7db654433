"""Compiles a config's training step for a machine that need not be there.

    python -m train.compile_ahead configs/paper_7_6b.py --topology v5p:4x4x4
    python -m train.compile_ahead configs/paper_7_6b.py --topology v5p:4x4x4 \\
        --training.batch-size 512 --json step.json

For TPUs it needs libtpu (Linux on x86-64), and no TPU: see
docs/tutorials/compile_ahead.md. Exit code 0: it fits. 1: it does not, with the
compiler's figures. 2: an option cannot be used.
"""

import dataclasses
import sys

from deltajax.training.ahead import (
  compile_step,
  DoesNotFitError,
  report_lines,
)
from deltajax.training.targets import get_target
from train.cli import (
  AheadRun,
  check_json_file,
  main,
  parse_ahead,
  RUN_ERROR,
  write_json_file,
)


def parse(arguments: list[str]) -> AheadRun:
  """Parses the command line."""
  return parse_ahead("python -m train.compile_ahead", arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Compiles, then prints what the step needs."""
  run = parse(arguments)
  check_json_file(run.json)
  target = get_target(run.topology)
  try:
    report = compile_step(run.config, target, run.name)
  except DoesNotFitError as error:
    print(
      f"{run.name} does not fit {run.topology}: {error}",
      file=sys.stderr,
    )
    failed = {"target": run.topology, "config": run.name, "fits": False}
    write_json_file(run.json, failed | {"message": str(error)})
    raise SystemExit(RUN_ERROR) from None
  print("\n".join(report_lines(report)))
  write_json_file(run.json, dataclasses.asdict(report))


if __name__ == "__main__":
  main(command, resumes=False)
