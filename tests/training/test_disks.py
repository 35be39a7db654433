"""Disks that are full or read-only: real ones, small, of a test's own."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


def may_mount():
  try:
    done = subprocess.run([*OWN_MOUNTS, "true"], capture_output=True)
  except OSError:
    return False
  return done.returncode == 0


pytestmark = pytest.mark.skipif(
  not may_mount(), reason="this system lets nobody mount a disk of their own"
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


def test_a_disk_that_is_full_for_a_while(corpus, tmp_path):
  """Costs a checkpoint, and neither an update nor a line of the metrics."""
  done = run_on_disk(corpus, tmp_path, "full")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  meanwhile = lines[lines.index("full") : lines.index("free")]
  (metrics,) = (x for x in meanwhile if x.startswith("WARNING   metrics"))
  assert "No space left on device" in metrics
  assert any(
    x.startswith("WARNING   a checkpoint could not be written")
    and "the last good checkpoint has 10 updates" in x
    for x in meanwhile
  ), meanwhile
  assert lines[-2].split() == ["updates", *map(str, range(1, 41))]
  assert lines[-1].split()[:1] == ["checkpoints"]
  assert all(
    x.isdigit() for x in lines[-1].split()[1:]
  )  # Nothing half-written.
  assert lines[-1].endswith(" 40")


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ("read-only", "Read-only file system"),
    ("full-at-start", "No space left on device"),
  ],
)
def test_a_disk_on_which_no_run_can_start(corpus, tmp_path, fault, message):
  done = run_on_disk(corpus, tmp_path, fault)
  assert done.returncode == 1
  (error,) = (x for x in done.stderr.splitlines() if x.startswith("error: "))
  assert message in error
  assert str(tmp_path / "run") in error
