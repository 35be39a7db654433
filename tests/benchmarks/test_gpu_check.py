"""The script for GPUs: a dry run, and what it makes of parts that fail."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import QUICK_FLAGS

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ("parity", "speed", "steps", "tokens")

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  -c*) echo "gpu Fake jax 1" ;;
  *kernel_parity*) echo "16 of 18 cases are good"; exit 1 ;;
  *variant_steps*) echo "flags $XLA_FLAGS"; exit 124 ;;
  *) echo "done: $*" ;;
esac
"""


def gpu_check(*options, **environment):
  return subprocess.run(
    ["benchmarks/gpu_check.sh", *map(str, options)],
    cwd=ROOT,
    env=os.environ | {"PYTHON": sys.executable} | environment,
    capture_output=True,
    text=True,
    check=False,
  )


def verdicts(out) -> dict[str, str]:
  lines = (out / "summary.txt").read_text().splitlines()[1:5]
  return {line[:8].strip(): line[9:21].strip() for line in lines}


def test_a_dry_run(tmp_path):
  done = gpu_check("--small", tmp_path, XLA_FLAGS=QUICK_FLAGS)
  assert done.returncode == 0, done.stdout + done.stderr
  assert verdicts(tmp_path) == dict.fromkeys(PARTS, "passed")
  for part in PARTS:
    assert json.loads((tmp_path / f"{part}.json").read_text())
  summary = (tmp_path / "summary.txt").read_text()
  assert "4 of 4 cases are good" in summary
  assert summary.count("interpret_triton") == 4 + 1


def test_parts_that_fail_do_not_stop_the_others(tmp_path):
  python = tmp_path / "python"
  python.write_text(FAKE_PYTHON)
  python.chmod(0o755)
  out = tmp_path / "new" / "out"
  out.mkdir(parents=True)
  (out / "parity.json").write_text("[]")
  done = gpu_check(out, PYTHON=str(python))
  assert done.returncode == 1
  assert verdicts(out) == {
    "parity": "FAILED (1)",
    "speed": "passed",
    "steps": "OUT OF TIME",
    "tokens": "passed",
  }
  assert "16 of 18 cases are good" in (out / "summary.txt").read_text()
  assert "autotune_level=0" in (out / "steps.log").read_text()
  # Of an earlier check nothing is left.
  assert not (out / "parity.json").exists()
  assert "--implementation pallas_triton" in (out / "speed.log").read_text()
  assert "--preset qwen3-0.6b" in (out / "tokens.log").read_text()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--fast",), "unknown option --fast; usage:"),
    (("OUT", "more"), "two output folders"),
    (("OUT",), "JAX finds no GPU; --small is a dry run"),
  ],
)
def test_what_it_does_not_take(tmp_path, options, message):
  options = [str(tmp_path / x) if x == "OUT" else x for x in options]
  done = gpu_check(*options)
  assert done.returncode == 2
  assert message in done.stderr
