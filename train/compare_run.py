"""One run of a comparison, in a process of its own; train.compare starts it.

    python -m train.compare_run WORKDIR < CONFIG.json

It ends when the process that started it does, with a checkpoint.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time

from deltajax.comparison import record
from deltajax.config import from_dict, RunConfig
from train.cli import main


def command(arguments: list[str]) -> None:
  """Trains, or resumes, and writes down how it began and ended."""
  (workdir,) = map(pathlib.Path, arguments)
  config = from_dict(RunConfig, json.load(sys.stdin))
  threading.Thread(target=end_with_parent, daemon=True).start()

  record.train_recorded(config, workdir, lambda line: print(line, flush=True))


def end_with_parent() -> None:
  """Ends this process, as SIGTERM does, once its parent has ended."""
  parent = os.getppid()
  while os.getppid() == parent:
    time.sleep(0.2)
  os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
  main(command)
