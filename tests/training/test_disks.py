"""Disks that are full or read-only: real ones, small, of a test's own."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

WAYS = (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "-m"))


def own_mounts():
  """How to start a process with mounts of its own: as root, or as anybody."""
  for way in WAYS:
    command = [*way, "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
      if not subprocess.run(command, capture_output=True).returncode:
        return way
    except OSError:
      pass
  return None


OWN_MOUNTS = own_mounts()
pytestmark = pytest.mark.skipif(
  OWN_MOUNTS is None, reason="this system lets nobody mount a disk of their own"
)


def run_on_disk(corpus, tmp_path, fault):
  return subprocess.run(
    [
      *(*OWN_MOUNTS, sys.executable, "-m", "tests.training.disk_program"),
      *(corpus, tmp_path, fault),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ("full", "No space left on device"),
    ("read-only", "Read-only file system"),
  ],
)
def test_a_disk_that_refuses_for_a_while(corpus, tmp_path, fault, message):
  """Costs a checkpoint, and neither an update nor a line of the metrics."""
  done = run_on_disk(corpus, tmp_path, fault)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  warnings = [x for x in lines if x.startswith("WARNING")]
  first, *_ = (x for x in warnings if "checkpoint could not be written" in x)
  assert "the last good checkpoint has 10 updates" in first
  assert any(message in x for x in warnings), warnings
  # Open files can be written to where none can be made.
  of_metrics = [x for x in warnings if "metrics could not be written" in x]
  assert len(of_metrics) == (fault == "full")
  assert lines[-2].split() == ["updates", *map(str, range(1, 41))]
  name, *checkpoints = lines[-1].split()
  assert name == "checkpoints"
  assert all(map(str.isdigit, checkpoints))  # Nothing half-written.
  assert checkpoints[-1] == "40"


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ("read-only-at-start", "Read-only file system"),
    ("full-at-start", "No space left on device"),
  ],
)
def test_a_disk_on_which_no_run_can_start(corpus, tmp_path, fault, message):
  done = run_on_disk(corpus, tmp_path, fault)
  assert done.returncode == 1
  (error,) = (x for x in done.stderr.splitlines() if x.startswith("error: "))
  assert message in error
  assert str(tmp_path / "run") in error
