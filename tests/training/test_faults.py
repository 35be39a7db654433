"""What a run survives, as processes; `benchmarks/faults.py` does more of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from deltajax.config import ConfigError
from deltajax.training.loop import train
from deltajax.training.run_directory import RunDirectory
from deltajax.training.stopping import PREEMPTED, stop_requests
from tests.helpers import ROOT
from tests.training.test_loop import losses, quiet, tiny_config


def test_kills_sigterm_and_damage_change_no_bit(corpus, tmp_path):
  """The same command, in a shorter form; it compares the losses itself."""
  file = tmp_path / "outcomes.json"
  done = subprocess.run(
    [
      *(sys.executable, "benchmarks/faults.py", "--steps", "40"),
      *("--kills", "2", "--terms", "1", "--damages", "1"),
      *("--preparations", "1"),
      *("--dataset", corpus, "--data-dir", corpus.parents[2], "--json", file),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  outcomes = json.loads(file.read_text())
  assert [(x["fault"], x["equal"]) for x in outcomes] == [
    ("kills", True),
    ("terms", True),
    ("damages", True),
    ("preparations", True),
  ]


def test_a_second_process_is_refused(corpus, tmp_path):
  config = tiny_config(corpus, stop_after=10)
  train(config, tmp_path / "run", quiet)
  directory = RunDirectory(tmp_path / "run")
  with directory.locked():
    message = re.escape(f"run is in use by process {os.getpid()} of")
    with pytest.raises(ConfigError, match=message):
      train(tiny_config(corpus), tmp_path / "run", quiet)
  train(tiny_config(corpus), tmp_path / "run", quiet)
  assert losses(tmp_path / "run")[-1][0] == 20


def test_sigterm_is_caught_only_inside():
  before = signal.getsignal(signal.SIGTERM)
  with stop_requests() as request:
    assert not request.reached()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    assert request.reached()
  assert signal.getsignal(signal.SIGTERM) is before


def test_exit_code_and_message_of_a_preempted_run(corpus, tmp_path):
  workdir = tmp_path / "run"
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "train.pretrain", "configs/quickstart.py"),
      *("--workdir", workdir, "--data.dataset", corpus, "--model.width", "16"),
      *("--model.head-dim", "8", "--training.log-every", "1"),
      *("--training.eval-sequences", "8", "--data.sequence-length", "32"),
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  for line in process.stdout:
    if line.startswith("step"):
      process.send_signal(signal.SIGTERM)
      break
  _, errors = process.communicate()
  assert process.returncode == PREEMPTED, errors
  (message,) = (x for x in errors.splitlines() if x.startswith("stopped: "))
  done = int(re.search(r"(\d+) of 600 updates are done and saved", message)[1])
  assert losses(workdir)[-1][0] == done
  assert (workdir / "checkpoints" / str(done)).is_dir()
