"""What becomes of processes, with processes that train nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from configs import small
from deltajax.comparison import record, runner
from deltajax.comparison.plan import Comparison
from deltajax.config import ConfigError
from deltajax.training.stopping import PreemptedError

FINISH = """
import json, pathlib, sys
config = json.load(sys.stdin)
run = pathlib.Path(sys.argv[1])
run.mkdir(parents=True)
(run / "outcome.json").write_text(json.dumps({
  "step": config["training"]["steps"],
  "validation": {"validation/loss": 1.5},
  "skipped": 0,
  "peak_step_bytes": 1,
}))
print("trained", config["training"]["seed"])
"""


@pytest.fixture
def runs(tmp_path):
  comparison = Comparison(
    base=small.get_config(),
    arms={"a": {}, "b": {"model.routing.num_blocks": 2}},
    baseline="a",
    seeds=(0, 1),
  )
  return comparison.runs(tmp_path / "out")


def execute(runs, program, lines=None, **options):
  log = [].append if lines is None else lines.append
  return runner.execute(runs, [sys.executable, "-c", program], log, **options)


def test_what_is_done_is_not_done_again(runs):
  lines = []
  assert execute(runs[1:2], FINISH) == []
  assert execute(runs, FINISH, lines) == []
  assert [x for x in lines if x.startswith("run")] == [
    "run       1 of 4: a seed 0",
    "run       3 of 4: a seed 1",
    "run       4 of 4: b seed 1",
  ]
  assert record.read_outcome(runs[3].directory).step == 1000
  log = runs[3].directory.parents[2] / "logs/b/seed-1.log"
  assert log.read_text() == "trained 1\n"
  seconds = log.with_suffix(".seconds")
  with seconds.open("a") as file:
    file.write("100.5\n")
  assert 100.5 <= runner.spent_seconds(runs) < 160
  # Not those of other seeds.
  assert runner.spent_seconds(runs[:2]) < 60


@pytest.mark.parametrize(
  ("program", "exit_code"),
  [
    ("print('before'); raise SystemExit(3)", 3),
    ("import os; print('before', flush=True); os.kill(os.getpid(), 9)", -9),
    ("print('before')", 0),  # and nothing is done
  ],
)
def test_a_process_that_dies_does_not_stop_the_others(runs, program, exit_code):
  died = execute(runs[:2], program)
  assert [(x.run.arm, x.exit_code, x.tail) for x in died] == [
    ("a", exit_code, "before"),
    ("b", exit_code, "before"),
  ]
  assert runner.find_failure(runs[1]) == died[1]
  # Tried again, and now it works.
  assert execute(runs[:2], FINISH) == []
  assert runner.find_failure(runs[1]) is None


def test_a_run_that_cannot_be_stops_the_others(runs):
  program = "print('error: no such mesh'); raise SystemExit(2)"
  with pytest.raises(ConfigError, match="a seed 0 cannot be trained:\nerror: "):
    execute(runs, program)
  assert runner.find_failure(runs[0]) is None


def test_what_cannot_be_compared_ends_all_at_once(runs):
  """Not when hours are spent: after the run that shows it."""

  def check():
    if runner.is_finished(runs[1]):
      raise ConfigError("b began with other values")

  with pytest.raises(ConfigError, match="b began with other values"):
    execute(runs, FINISH, check=check)
  assert [runner.is_finished(run) for run in runs] == [True, True, False, False]
  # Nor does the same command go on.
  with pytest.raises(ConfigError, match="b began with other values"):
    execute(runs, FINISH, check=check)
  assert not runner.is_finished(runs[2])


def test_ctrl_c_in_a_process_ends_all(runs):
  with pytest.raises(KeyboardInterrupt):
    execute(runs, "raise SystemExit(130)")
  assert not runs[1].directory.parent.exists()


def test_sigterm_ends_all_at_any_time(runs):
  """Also before a run can catch it, which then dies of it."""
  before = signal.getsignal(signal.SIGTERM)
  timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
  timer.start()
  with pytest.raises(PreemptedError, match="during a seed 0"):
    execute(runs, "import time; time.sleep(60)")
  assert signal.getsignal(signal.SIGTERM) == before
  assert runner.find_failure(runs[0]) is None


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
  """Checked as train.compare_run does it."""
  child = (
    "import os, threading, time\n"
    "from train.compare_run import end_with_parent\n"
    "threading.Thread(target=end_with_parent, daemon=True).start()\n"
    f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    "time.sleep(60)\n"
  )
  parent = subprocess.Popen(
    [
      sys.executable,
      "-c",
      "import subprocess, sys\n"
      "subprocess.run([sys.executable, '-c', sys.argv[1]])",
      child,
    ]
  )
  pid = tmp_path / "pid"
  while not (pid.exists() and pid.read_text()):
    time.sleep(0.05)
  parent.kill()
  parent.wait()
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline:
    try:
      os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
      return
    time.sleep(0.1)
  raise AssertionError("the process lives on")
