"""The benchmark scripts run, on toys, and print what they say they print."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from unittest import mock

import jax
import pytest

from benchmarks import (
  compile_kernels,
  depth_attention,
  faults,
  generation,
  import_speed,
  kernel_parity,
  memory,
  prepare_data,
  read_groups,
  step_time,
  variant_steps,
)
import deltajax
from deltajax.config import ConfigError
from tests.helpers import QUICK_FLAGS

ROOT = pathlib.Path(__file__).parents[2]
TOY = ("--width", "32", "--sequence-length", "16", "--num-blocks", "2")


def run(script, *options):
  return subprocess.run(
    [sys.executable, f"benchmarks/{script}.py", *map(str, options)],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": QUICK_FLAGS},
    capture_output=True,
    text=True,
    check=False,
  )


def test_vectors_of_reads_in_groups(tmp_path):
  """Four sublayers, which see 0, 2, 3 and 4 sources."""
  file = tmp_path / "rows.json"
  done = run(
    "read_groups",
    *("--variants", "delta", "--layers", 2, "--groups", 1, 2, "--json", file),
  )
  assert done.returncode == 0, done.stderr
  alone, together = json.loads(file.read_text())
  # Stored before the layers: e, then e, v0, v1. v0 and v2 are merged.
  assert alone == dataclasses.asdict(
    read_groups.Row("delta", 2, 1, (1 + 3) / 4 + 1, 0.5 + 3, 3 + 2, 1.5 + 5)
  )
  # Stored before both: e. Merged: v0; v0, v1; v0, v1, v2.
  assert together == dataclasses.asdict(
    read_groups.Row("delta", 2, 2, 1 / 4 + 1, 1.5 + 3, 3 / 4 + 2, 4.5 + 5)
  )
  assert "5.5    2.0    3.5" in done.stdout
  refused = run("read_groups", "--variants", "delta_block", "--groups", 2)
  assert refused.returncode == 2
  assert "reads few sources" in refused.stderr


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


def test_step_time_by_mesh(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "step_time",
    *TOY,
    *("--layers", 2, "--rounds", 2, "--batch-size", 4),
    *("--variants", "delta", "--meshes", "data=1", "data=2,fsdp=2"),
    *("--json", file),
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
  found = json.loads(file.read_text())
  assert [row["depth_attention"] for row in found] == [
    *("nothing is read", "xla") * 2,
  ]


def test_analysis():
  done = run(
    "analysis",
    *("--variants", "delta", "--width", 16, "--layers", 2),
    *("--sequence-length", 8, "--batch-size", 2, "--rounds", 1),
  )
  assert done.returncode == 0, done.stderr
  rows = [line.split() for line in done.stdout.splitlines()[-4:]]
  names = ["forward", "weights", "analysis", "gradients"]
  assert [row[:2] for row in rows] == [["delta", name] for name in names]
  assert float(rows[0][3]) == 1
  assert all(float(row[2]) > 0 for row in rows)


def test_lm_eval_requests(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "lm_eval_requests",
    *("--requests", 8, "--rounds", 1, "--context", 24, "--width", 32),
    *("--layers", 1, "--new-tokens", 2, "--transformers", "False"),
    *("--json", file),
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads(file.read_text())
  assert [(row["kind"], row["requests"]) for row in rows] == [
    *(("choices", 8), ("words", 8), ("rolling", 8), ("generate", 2)),
  ]
  for row in rows:
    assert row["ours"] > 0
    assert row["theirs"] is row["ratio"] is None


def test_depth_attention_says_what_must_be_moved(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "depth_attention",
    *("--slots", 9, "--widths", 1024, "--reads", 1),
    *("--sequence-lengths", 128, "--json", file),
  )
  assert done.returncode == 0, done.stderr
  forward, backward = json.loads(file.read_text())
  # 9 sources and a mix; 9 sources, their gradients twice, a mix and its own.
  assert forward["bytes"] == 128 * (10 * 2048 + 4)
  assert backward["bytes"] == 128 * (29 * 2048 + 8)
  # The TPU kernel: queries and their gradient besides.
  assert 10 < forward["tpu_vectors"] < 10.5
  assert 29 < backward["tpu_vectors"] < 29.5
  assert "xla" in done.stdout
  assert forward["seconds"] is None  # On a CPU.


def test_generation(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "generation",
    *("--layers", 4, "--vocab-size", 512, "--transformers", "False"),
    *("--rounds", 2, "--prefill-rounds", 1, "--prompt-length", 32),
    *("--json", file),
  )
  assert done.returncode == 0, done.stderr
  standard, delta_block = json.loads(file.read_text())
  assert standard["name"] == "standard"
  assert standard["decode_ratio"] == standard["prefill_ratio"] == 1
  assert delta_block["decode"] > 0
  # With zero queries it is the standard model.
  assert delta_block["same_tokens"] == 1
  assert f"{delta_block['decode']:.1f}" in done.stdout


def test_import_speed(tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "import_speed",
    *("--layers", 1, "--workdir", tmp_path, "--json", file),
  )
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(file.read_text())
  embedding = 49_152 * 576 * 4
  assert row["largest_tensor_bytes"] == embedding
  assert embedding < row["parameter_bytes"] < row["peak_bytes"]
  assert row["seconds"] > 0
  assert "smollm2-135m" in done.stdout
  assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("measured", ["speed", "memory"])
def test_prepare_data(measured, tmp_path):
  file = tmp_path / "rows.json"
  done = run(
    "prepare_data",
    *("--megabytes", 0.3, "--files", 2, "--vocab-size", 400, "--workers", 0),
    *("--sequence-length", 64, "--rounds", 1, "--workdir", tmp_path),
    *("--json", file, *(["--memory"] if measured == "memory" else [])),
  )
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(file.read_text())
  if measured == "speed":
    assert row["ratio"] == (
      row["prepare_per_second"] / row["library_per_second"]
    )
    assert "median ratio" in done.stdout
  else:
    # No workers; a library may start a process for a moment.
    assert row["processes"] in (1, 2)
    assert 10**8 < row["peak_bytes"] < 1.5e9
    assert "0.3 MB of text: " in done.stdout
  assert list(tmp_path.iterdir()) == [file]


def test_depth_attention_measures_where_there_is_a_gpu(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(depth_attention, "COPY_BYTES", 2**16)
  options = depth_attention.Options(
    slots=(2,),
    widths=(64,),
    reads=(2,),
    sequence_lengths=(16,),
    implementation="xla",
  )
  rows = list(depth_attention.measure(options))
  assert [row.direction for row in rows] == ["forward", "backward"]
  for row in rows:
    assert row.seconds > 0
    assert row.xla_seconds > 0
    assert row.of_copy > 0


def test_step_time_of_a_preset():
  options = step_time.Options(preset="qwen3-0.6b", dtype="bfloat16")
  config = step_time.model_config(options, "delta")
  expected = deltajax.presets["qwen3-0.6b"]
  assert config.routing.variant == "delta"
  for field in ("width", "num_layers", "vocab_size", "head_dim", "mlp_width"):
    assert getattr(config, field) == getattr(expected, field)
  assert config.dtype == "bfloat16"


def test_damage_costs_all_updates_since_the_checkpoint_before(
  tmp_path, monkeypatch
):
  """10 updates are made; of checkpoints 4 and 8 the second is damaged."""
  for updates in (4, 8):
    (tmp_path / str(updates)).mkdir()
    (tmp_path / str(updates) / "array").write_bytes(b"numbers")
  process = mock.Mock(**{"poll.return_value": 0})
  run = mock.Mock(checkpoints=tmp_path)
  run.made.return_value = 10
  run.start.return_value = process
  monkeypatch.setattr(faults, "moments", lambda *_: [lambda *_: None])
  assert faults.damage(run, faults.Options(), random.Random(0)) == 10 - 4
  (undamaged,) = (tmp_path / "4").iterdir()
  assert undamaged.read_bytes() == b"numbers"
  files = [x.read_bytes() for x in (tmp_path / "8").iterdir()]
  assert files != [b"numbers"]


def test_input_and_checkpoints(tmp_path, corpus):
  file = tmp_path / "figures.json"
  done = run(
    "input_and_checkpoints",
    *("--steps", 15, "--checkpoint-every", 5, "--batches", 100),
    *("--dataset", corpus, "--data-dir", tmp_path, "--json", file),
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(file.read_text())
  for name in ("data_wait", "checkpoint_share"):
    assert 0 < found[name] < 1
  assert found["pipeline_tokens"] == pytest.approx(
    found["pipeline_ratio"] * found["step_tokens"]
  )
  assert f"{found['data_wait']:.2%} of the time (bound 1%)" in done.stdout


def test_compile_kernels_names_what_does_not_compile(tmp_path):
  pytest.importorskip("libtpu")
  file = tmp_path / "rows.json"
  done = run(
    "compile_kernels",
    *("--chips", "v5p", "--slots", 2, "--widths", 256, 131_072),
    *("--reads", 1, "--dtypes", "bfloat16", "--sequence-length", 16),
    *("--json", file),
  )
  assert done.returncode == 1, done.stderr
  assert "2 of 4 passes compile" in done.stdout
  assert "MiB of VMEM for 16 tokens, 40 MiB may be used" in done.stdout
  rows = json.loads(file.read_text())
  assert [row["error"] is None for row in rows] == [True, True, False, False]


@pytest.mark.parametrize(
  ("benchmark", "options", "message"),
  [
    (compile_kernels, ("--chips", "v5e", "v5x"), "unknown TPU 'v5x'"),
    (compile_kernels, ("--dtypes", "float16"), "unknown dtype 'float16'"),
    (kernel_parity, ("--json", "no/such/dir/f"), "there is no directory"),
    (step_time, ("--preset", "qwen3-0.66b"), "did you mean 'qwen3-0.6b'"),
    (step_time, ("--meshes", "fsdp"), "give sizes as in fsdp=4,tensor=2"),
    (variant_steps, ("--variants", "dleta"), "did you mean 'delta'"),
    (variant_steps, ("--implementation", "triton"), "unknown implementation"),
    (memory, ("--json", "no/such/dir/f"), "there is no directory"),
    (prepare_data, ("--tokenizer", "bytes"), "no library to compare with"),
    (generation, ("--tokens", 1), "--tokens is 1; give at least 2"),
    (import_speed, ("--presets", "smolm2-135m"), "mean 'smollm2-135m'"),
    (
      depth_attention,
      ("--implementation", "pallas_tpu"),
      "it runs on tpu, the platform is cpu",
    ),
  ],
)
def test_what_is_wrong(benchmark, options, message):
  with pytest.raises(ConfigError, match=message):
    benchmark.command(list(map(str, options)))


def test_an_error_is_one_message():
  done = run("step_time", "--meshes", "fsdp")
  assert done.returncode == 2
  assert "give sizes as in" in done.stderr
  assert "Traceback" not in done.stderr
