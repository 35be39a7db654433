"""What routing costs in memory, at the shape of a whole recipe."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Peak of the 1044M model's value-and-grad on a v5p chip, of that of `standard`.
MOST = {"delta_block": 1.03, "attnres_block": 1.03, "delta": 1.3}


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: make libtpu",
)
def test_peaks_beside_the_standard_model(tmp_path):
  file = tmp_path / "rows.json"
  done = subprocess.run(
    [
      *(sys.executable, ROOT / "benchmarks" / "memory.py"),
      *("--config", ROOT / "configs" / "paper_1044m.py"),
      *("--targets", "v5p:1x1x1", "--batch-size", "4"),
      *("--sequence-length", "2048", "--json", file),
      *("--variants", "standard", *MOST),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  peak = {
    row["variant"]: row["peak_bytes"] for row in json.loads(file.read_text())
  }
  for variant, most in MOST.items():
    assert 1 < peak[variant] / peak["standard"] <= most, variant
