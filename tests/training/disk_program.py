"""A run on a small disk of its own: python -m tests.training.disk_program ...

Runs in a mount namespace, see `test_disks`.
"""

import json
import pathlib
import subprocess

from deltajax.training.loop import train
from tests.training.test_loop import tiny_config
from train.cli import main as exit_with_message

MIB = 2**20


def main(arguments):
  """Prints the console's lines, and what the fault did to the disk."""

  corpus, workdir, fault = arguments

  def call(*command):
    subprocess.run(command, check=True, capture_output=True)

  call("mount", "-t", "tmpfs", "-o", f"size={8 * MIB}", "none", workdir)
  run = pathlib.Path(workdir) / "run"
  filler = pathlib.Path(workdir) / "filler"
  options = {"log_every": 1, "checkpoint_every": 5, "steps": 40}

  def fill():
    with filler.open("wb", buffering=0) as file:
      size = MIB
      while size:
        try:
          file.write(b"x" * size)
        except OSError:
          size //= 2

  def log(line):
    print(line, flush=True)
    if line.startswith("step 12/") and fault == "full":
      fill()
    if line.startswith("step 12/") and fault == "read-only":
      call("mount", "--bind", run, run)
      call("mount", "-o", "remount,bind,ro", run)
    if line.startswith("step 32/") and fault == "full":
      filler.unlink()
    if line.startswith("step 32/") and fault == "read-only":
      call("umount", "--lazy", run)

  train(tiny_config(corpus, stop_after=10, **options), run, log)
  if fault == "read-only-at-start":
    call("mount", "-o", "remount,ro", workdir)
  if fault == "full-at-start":
    fill()
  train(tiny_config(corpus, **options), run, log)
  lines = (run / "metrics.jsonl").read_text().splitlines()
  print("updates", *sorted({json.loads(line)["step"] for line in lines}))
  train(tiny_config(corpus, **options), run, lambda line: None)
  print("checkpoints", *sorted(x.name for x in (run / "checkpoints").iterdir()))


if __name__ == "__main__":
  exit_with_message(main)
