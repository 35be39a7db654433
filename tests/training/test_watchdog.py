import functools
import os
import re
import subprocess
import sys
import time

from deltajax.training import loop, watchdog as module
from deltajax.training.stopping import HUNG
from tests.helpers import ROOT
from tests.training.test_loop import tiny_config

Watchdog = functools.partial(module.Watchdog, compile_seconds=0.0)


def wait_for_a_lock_that_never_comes(seconds):
  time.sleep(seconds)


def test_a_hang_is_reported_once_with_stacks(tmp_path):
  lines = []
  with Watchdog(0.2, tmp_path / "stacks.txt", lines.append) as watchdog:
    watchdog.begin("update", 7)
    wait_for_a_lock_that_never_comes(1.0)
    watchdog.begin("update", 8)
  assert lines[0].startswith("WARNING   update 7 takes more than 0.2 s")
  assert lines[1].startswith("watchdog  update 7 ended after ")
  assert len(lines) == 2
  stacks = (tmp_path / "stacks.txt").read_text()
  assert ": update 7\n" in stacks
  assert "wait_for_a_lock_that_never_comes" in stacks


def test_a_hang_is_reported_where_no_file_can_be_written(tmp_path, capfd):
  lines = []
  with Watchdog(0.2, tmp_path / "none" / "stacks", lines.append) as watchdog:
    watchdog.begin("update", 7)
    wait_for_a_lock_that_never_comes(1.0)
    watchdog.begin("update", 8)
  first, second, last = lines
  assert first.startswith("WARNING   update 7 takes more than 0.2 s")
  assert "No such file or directory" in second
  assert last.startswith("watchdog  update 7 ended after ")
  assert "wait_for_a_lock_that_never_comes" in capfd.readouterr().err


HUNG_DISK = """
import os, pathlib, sys, time
from deltajax.training import watchdog

class Hung(type(pathlib.Path())):
  def open(self, *args):
    time.sleep(60)

watchdog.REPORT_SECONDS = 1.0
with watchdog.Watchdog(0.2, Hung("x"), exits=True, compile_seconds=0.0):
  time.sleep(60)
"""


def test_a_disk_that_hangs_keeps_nobody_from_hearing_of_it():
  done = subprocess.run(
    [sys.executable, "-c", HUNG_DISK],
    env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    capture_output=True,
    text=True,
    timeout=30,
    check=False,
  )
  assert done.returncode == HUNG
  assert "WARNING   start takes more than 0.2 s" in done.stdout
  assert "most recent call first" in done.stderr


def test_what_ends_while_it_is_reported_does_not_end_the_process(
  tmp_path, monkeypatch
):
  ended = []
  monkeypatch.setattr(module.os, "_exit", ended.append)
  lines = []

  def log(line):
    lines.append(line)
    if line.startswith("WARNING"):
      watchdog.begin("update", 2)

  with Watchdog(0.5, tmp_path / "stacks", log, exits=True) as watchdog:
    watchdog.begin("update", 1)
    time.sleep(0.8)
  assert len(lines) == 2
  assert not ended


def test_what_goes_on_is_not_reported(tmp_path):
  lines = []
  with Watchdog(2.0, tmp_path / "stacks.txt", lines.append) as watchdog:
    for step in range(30):
      watchdog.begin("update", step)
      time.sleep(0.1)
  assert not lines
  assert not (tmp_path / "stacks.txt").exists()


def test_the_first_of_each_kind_may_compile(tmp_path):
  lines = []
  with Watchdog(
    0.2, tmp_path / "stacks.txt", lines.append, compile_seconds=60.0
  ) as watchdog:
    for kind in ("update", "validation"):
      watchdog.begin(kind, 1)
      time.sleep(0.4)
      assert not lines
    watchdog.begin("update", 2)
    time.sleep(0.4)
  (line,) = lines
  assert line.startswith("WARNING   update 2 takes more than 0.2 s")


def test_none_watches_nothing(tmp_path):
  with Watchdog(None, tmp_path / "stacks.txt") as watchdog:
    watchdog.begin("update", 1)


SCRIPT = """
import pathlib, sys, time
from deltajax.training.watchdog import Watchdog
with Watchdog(
  0.2, pathlib.Path(sys.argv[1]), exits=True, compile_seconds=0.0
):
  time.sleep(60)
"""


def test_it_can_end_the_process(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT, tmp_path / "stacks.txt"], check=False
  )
  assert done.returncode == HUNG
  assert (tmp_path / "stacks.txt").exists()


HUNG_STEP = """
import dataclasses, pathlib, sys, time
import jax
from deltajax.config import HealthConfig
from deltajax.training import loop, step
from tests.training.test_loop import tiny_config

def hang(made):
  if made == 3:
    time.sleep(600)
  return made

def judge(config, health, loss, norm):
  made = jax.pure_callback(hang, health.made, health.made)
  return real(config, dataclasses.replace(health, made=made), loss, norm)

real, step.judge = step.judge, judge
corpus, workdir = sys.argv[1:]
config = dataclasses.replace(
  tiny_config(corpus, steps=6),
  health=HealthConfig(hang_seconds=1.0, hang_exits=True),
)
loop.train(config, pathlib.Path(workdir), lambda line: print(line, flush=True))
"""


def test_a_step_that_hangs_ends_the_run_with_stacks(corpus, tmp_path):
  """A real one: the device never ends it."""
  done = subprocess.run(
    [sys.executable, "-c", HUNG_STEP, corpus, tmp_path / "run"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == HUNG, done.stderr
  # It is the fourth; metrics are read one update late.
  found = re.search(r"WARNING   update [34] takes more than 1 s", done.stdout)
  assert found, done.stdout
  stacks = (tmp_path / "run" / "stacks-0.txt").read_text()
  assert "in run" in stacks


def test_all_of_a_run_is_watched(corpus, tmp_path, monkeypatch):
  kinds = []

  class Recorder(module.Watchdog):
    def begin(self, kind, number=None):
      if kinds[-1:] != [kind]:
        kinds.append(kind)
      super().begin(kind, number)

  monkeypatch.setattr(loop, "Watchdog", Recorder)
  loop.train(
    tiny_config(corpus, steps=5),
    tmp_path / "run",
    lambda line: None,
    on_start=lambda state: kinds.append("on_start"),
    on_end=lambda result: kinds.append("on_end"),
  )
  assert kinds == [
    *("start", "on_start", "update", "validation", "routing", "checkpoint"),
    *("update", "test", "report", "on_end", "end"),
  ]
