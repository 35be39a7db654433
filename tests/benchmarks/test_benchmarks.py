"""The benchmark scripts run, on toys, and print what they say they print."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOY = ("--width", "32", "--sequence-length", "16", "--num-blocks", "2")


def run(script, *options):
  return subprocess.run(
    [sys.executable, f"benchmarks/{script}.py", *map(str, options)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


def test_memory(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "memory",
    *TOY,
    *("--targets", "cpu:1", "--variants", "standard", "delta"),
    *("--layers", 2, 4, "--json", file),
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads(file.read_text())
  assert [(row["variant"], row["layers"]) for row in rows] == [
    *(("standard", 2), ("standard", 4), ("delta", 2), ("delta", 4)),
  ]
  for row in rows:
    assert row.keys() == {
      *("target", "config", "variant", "layers", "temp_bytes", "peak_bytes"),
    }
    assert 0 < row["temp_bytes"] < row["peak_bytes"]
    assert f"{row['temp_bytes'] / 2**20:.1f}" in done.stdout


def test_memory_takes_what_a_config_says():
  done = run(
    "memory",
    *("--config", "configs/quickstart.py", "--targets", "cpu:1"),
    *("--variants", "delta_block", "--layers", 4, "--sequence-length", 16),
  )
  assert done.returncode == 0, done.stderr
  assert "quickstart  delta_block" in done.stdout


def test_an_unknown_target_is_one_message():
  done = run("memory", "--targets", "v5p:4x4")
  assert done.returncode == 2
  assert "v5p has 3 axes" in done.stderr
  assert "Traceback" not in done.stderr


def test_step_time_by_mesh():
  done = run(
    "step_time",
    *TOY,
    *("--layers", 2, "--rounds", 2, "--batch-size", 4),
    *("--variants", "delta", "--meshes", "data=1", "data=2,fsdp=2"),
  )
  assert done.returncode == 0, done.stderr
  rows = [line.split() for line in done.stdout.splitlines()[-4:]]
  assert [row[:2] for row in rows] == [
    ["standard", "data=1"],
    ["delta", "data=1"],
    ["standard", "data=2,fsdp=2"],
    ["delta", "data=2,fsdp=2"],
  ]
  assert all(float(row[2]) > 0 for row in rows)


def test_depth_attention_says_what_must_be_moved(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "depth_attention",
    *("--slots", 9, "--widths", 1024, "--reads", 1, "--tokens", 128),
    *("--json", file),
  )
  assert done.returncode == 0, done.stderr
  forward, backward = json.loads(file.read_text())
  # 9 sources and a mix; 9 sources, their gradients twice, a mix and its own.
  assert forward["bytes"] == 128 * (10 * 2048 + 4)
  assert backward["bytes"] == 128 * (29 * 2048 + 8)
  assert "xla" in done.stdout
  assert forward["seconds"] is None  # On a CPU.


def test_compile_kernels_names_what_does_not_compile(tmp_path):
  pytest.importorskip("libtpu")
  file = tmp_path / "rows.json"
  done = run(
    "compile_kernels",
    *("--chips", "v5p", "--slots", 2, "--widths", 256, 131_072),
    *("--reads", 1, "--dtypes", "bfloat16", "--tokens", 16, "--json", file),
  )
  assert done.returncode == 1, done.stderr
  assert "2 of 4 passes compile" in done.stdout
  assert "MiB of VMEM for 16 tokens, 40 MiB may be used" in done.stdout
  rows = json.loads(file.read_text())
  assert [row["error"] is None for row in rows] == [True, True, False, False]


def test_benchmarks_say_what_is_wrong():
  for script, options, message in (
    ("compile_kernels", ("--chips", "v5x"), "unknown TPU 'v5x'"),
    ("step_time", ("--meshes", "fsdp"), "give sizes as in fsdp=4,tensor=2"),
    ("memory", ("--json", "no/such/dir/f"), "there is no directory"),
    (
      "depth_attention",
      ("--implementation", "pallas_tpu"),
      "it runs on tpu, the platform is cpu",
    ),
  ):
    done = run(script, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
