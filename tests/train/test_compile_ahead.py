"""The command as a user runs it, on reduced models."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
REDUCED = (
  *("--model.num-layers", "2", "--model.routing.num-blocks", "2"),
  *("--model.width", "128", "--model.mlp-width", "256"),
  *("--model.num-heads", "8", "--model.num-kv-heads", "4"),
  *("--model.head-dim", "32", "--model.vocab-size", "512"),
  *("--data.sequence-length", "128"),
)
DELTA = ("--model.routing.variant", "delta")

has_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: make libtpu",
)


def run(*arguments):
  # The command sets what it needs for itself.
  hidden = ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
  return subprocess.run(
    [sys.executable, "-m", "train.compile_ahead", *map(str, arguments)],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k not in hidden},
    capture_output=True,
    text=True,
    check=False,
  )


@has_libtpu
@pytest.mark.parametrize(
  ("name", "topology", "options", "devices", "variant"),
  [
    ("paper_220m", "v5e:2x2", ("--training.accumulation", 4), 4, "delta_block"),
    ("paper_220m", "v5e:2x2", ("--model.read-group", 2, *DELTA), 4, "delta"),
    ("paper_533m", "v5e:4x4", (), 16, "delta_block"),
    ("paper_1044m", "v5e:4x4", (), 16, "delta_block"),
    ("paper_7_6b", "v5p:4x4x4", (), 64, "delta_block"),
    ("rd_120m", "v5e:2x2", (), 4, "rd_attnres"),
    ("rd_343m", "v5e:4x4", (), 16, "rd_attnres"),
    (
      *("delta_block_70b", "v5p:8x8x8", ("--training.batch-size", 128)),
      *(512, "delta_block"),
    ),
  ],
)
def test_recipes_compile_for_their_slice(
  name, topology, options, devices, variant, tmp_path
):
  file = tmp_path / "report.json"
  done = run(
    f"configs/{name}.py",
    *("--topology", topology, "--json", file, *REDUCED, *options),
  )
  assert done.returncode == 0, done.stderr
  report = json.loads(file.read_text())
  assert report["config"] == name
  assert report["target"] == topology
  assert report["variant"] == variant
  assert report["devices"] == devices
  assert report["fits"]
  assert report["attention"] == "splash"
  assert report["depth_attention"].split()[0] == "pallas_tpu"
  assert 0 < report["memory"]["peak"] < report["hbm_bytes"]
  # The state stays where it is: all that is returned but the metrics.
  memory = report["memory"]
  assert 0 < memory["output"] - memory["alias"] < 8192
  assert {c["kind"] for c in report["collectives"]} >= {"all-reduce"}
  assert f"{devices} x TPU" in done.stdout
  assert "peak" in done.stdout


@has_libtpu
def test_a_step_that_does_not_fit_ends_with_1_and_figures(tmp_path):
  file = tmp_path / "report.json"
  done = run(
    "configs/paper_1044m.py",
    *("--topology", "v5e:1x1", *REDUCED[:-2], "--json", file),
    *("--data.sequence-length", 2048, "--training.batch-size", 2048),
  )
  assert done.returncode == 1
  assert re.search(r"does not fit v5e:1x1: .*G.* HBM \(15\.75G\)", done.stderr)
  assert "Traceback" not in done.stderr
  assert json.loads(file.read_text())["fits"] is False


def test_cpu_devices_and_json(tmp_path):
  file = tmp_path / "report.json"
  done = run(
    "configs/quickstart.py", "--topology", "cpu:8", *REDUCED, "--json", file
  )
  assert done.returncode == 0, done.stderr
  report = json.loads(file.read_text())
  assert report["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1, "context": 1}
  assert report["hbm_bytes"] is None
  assert report["memory"]["peak"] > report["memory"]["temp"] > 0
  assert report["model_flops"] > 0
  # Data parallel: gradients are added up, parameters are not gathered.
  assert [c["kind"] for c in report["collectives"]] == ["all-reduce"]
