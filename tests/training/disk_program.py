"""A run on a small disk of its own: python -m tests.training.disk_program ...

Runs in a mount namespace: unshare --user --map-root-user --mount.
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

  def mount(*options):
    command = ["mount", *options, workdir]
    subprocess.run(command, check=True, capture_output=True)

  mount("-t", "tmpfs", "-o", f"size={8 * MIB}", "none")
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
    if fault == "full" and line.startswith("step 12/"):
      fill()
      print("full", flush=True)
    if fault == "full" and line.startswith("step 32/"):
      filler.unlink()
      print("free", flush=True)

  train(tiny_config(corpus, stop_after=10, **options), run, log)
  if fault == "read-only":
    mount("-o", "remount,ro")
  if fault == "full-at-start":
    fill()
  train(tiny_config(corpus, **options), run, log)
  lines = (run / "metrics.jsonl").read_text().splitlines()
  print("updates", *sorted({json.loads(line)["step"] for line in lines}))
  train(tiny_config(corpus, **options), run, lambda line: None)
  print("checkpoints", *sorted(x.name for x in (run / "checkpoints").iterdir()))


if __name__ == "__main__":
  exit_with_message(main)
