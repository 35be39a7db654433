import subprocess
import sys
import time

from deltajax.training.stopping import HUNG
from deltajax.training.watchdog import Watchdog


def wait_for_a_lock_that_never_comes(seconds):
  time.sleep(seconds)


def test_a_hang_is_reported_once_with_stacks(tmp_path):
  lines = []
  with Watchdog(0.2, tmp_path / "stacks.txt", lines.append) as watchdog:
    watchdog.begin("update 7")
    wait_for_a_lock_that_never_comes(1.0)
    watchdog.begin("update 8")
  assert lines[0].startswith("WARNING   update 7 takes more than 0.2 s")
  assert lines[1].startswith("watchdog  update 7 ended after ")
  assert len(lines) == 2
  stacks = (tmp_path / "stacks.txt").read_text()
  assert ": update 7\n" in stacks
  assert "wait_for_a_lock_that_never_comes" in stacks


def test_a_hang_is_reported_where_no_file_can_be_written(tmp_path, capfd):
  lines = []
  with Watchdog(0.2, tmp_path / "none" / "stacks", lines.append) as watchdog:
    watchdog.begin("update 7")
    wait_for_a_lock_that_never_comes(1.0)
  (line,) = lines
  assert "are in the error output (" in line
  assert "No such file or directory" in line
  assert "wait_for_a_lock_that_never_comes" in capfd.readouterr().err


def test_what_goes_on_is_not_reported(tmp_path):
  lines = []
  with Watchdog(2.0, tmp_path / "stacks.txt", lines.append) as watchdog:
    for step in range(30):
      watchdog.begin(f"update {step}")
      time.sleep(0.1)
  assert not lines
  assert not (tmp_path / "stacks.txt").exists()


def test_none_watches_nothing(tmp_path):
  with Watchdog(None, tmp_path / "stacks.txt") as watchdog:
    watchdog.begin("update 1")


SCRIPT = """
import pathlib, sys, time
from deltajax.training.watchdog import Watchdog
with Watchdog(0.2, pathlib.Path(sys.argv[1]), exits=True):
  time.sleep(60)
"""


def test_it_can_end_the_process(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT, tmp_path / "stacks.txt"], check=False
  )
  assert done.returncode == HUNG
  assert (tmp_path / "stacks.txt").exists()
