"""The command as a user runs it, with tiny models."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from deltajax.comparison.tables import COST_HEADING
from deltajax.config import ConfigError
from tests.helpers import QUICK_FLAGS, ROOT, run_module
from train.compare import command

ENVIRONMENT = {"XLA_FLAGS": QUICK_FLAGS}
run = functools.partial(run_module, "train.compare", env=ENVIRONMENT)

# `tied` is `parent` by definition; and so is `frozen_v` `frozen`, since queries
# that start at zero and do not learn make all reads uniform.
CONFIG = """
from deltajax.comparison.plan import Comparison
from tests.training.test_loop import tiny_config

FROZEN = {{"optimizer.query_multiplier": 0.0}}


def get_config():
  return Comparison(
    base=tiny_config("{corpus}", steps=60, eval_every=60, eval_routing=False),
    arms={{
      "parent": {{"model.routing.variant": "attnres_block"}},
      "tied": {{"model.routing.variant": "rd_tied"}},
      "frozen": {{"model.routing.variant": "attnres_block", **FROZEN}},
      "frozen_v": {{"model.routing.variant": "rd_frozen_v", **FROZEN}},
      "doomed": {{
        "health.skip_limit": 0,
        "optimizer.learning_rate": 1e30,
        "model.routing.variant": "standard",
      }},
    }},
    baseline="parent",
    pairs={{"frozen_v": ("frozen",)}},
    seeds=(0,),
  )
"""


ARMS = ("parent", "tied", "frozen", "frozen_v")


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
  path = tmp_path_factory.mktemp("configs") / "compare_tiny.py"
  path.write_text(CONFIG.format(corpus=corpus))
  return path


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """A comparison that nothing disturbed."""
  out = tmp_path_factory.mktemp("comparison") / "whole"
  done = run(config, "--out", out, "--arms", *ARMS)
  assert done.returncode == 0, done.stderr
  assert "run       2 of 4: tied seed 0" in done.stdout
  assert f"numbers   {out / 'comparison.json'}" in done.stdout
  return out


def tables(out):
  """All that does not depend on the machine and the day."""
  values = json.loads((out / "comparison.json").read_text())
  del values["costs"]
  text = (out / "comparison.md").read_text()
  return values, text.split(COST_HEADING)[0]


def test_models_that_are_one_by_definition_come_out_equal(whole):
  values, text = tables(whole)
  pairs = {(x["arm"], x["baseline"]): x["differences"] for x in values["pairs"]}
  assert pairs["tied", "parent"] == pytest.approx([0], abs=2e-6)
  assert pairs["frozen_v", "frozen"] == pytest.approx([0], abs=2e-6)
  assert abs(pairs["frozen", "parent"][0]) > 1e-5
  assert {x["shared_parameters"] for x in values["pairs"]} == {13}
  assert "`optimizer.query_multiplier` 0" in text


def test_interrupted_and_resumed(config, whole, tmp_path):
  out = shutil.copytree(whole, tmp_path / "out")
  for name in ("runs/tied", "logs/tied"):
    shutil.rmtree(out / name)
  for name in ("comparison.json", "comparison.md"):
    (out / name).unlink()
  arguments = (config, "--out", out, "--arms", *ARMS)
  process = subprocess.Popen(
    [sys.executable, "-m", "train.compare", *map(str, arguments)],
    cwd=ROOT,
    env=os.environ | ENVIRONMENT,
    stderr=subprocess.PIPE,
    text=True,
  )
  log = out / "logs/tied/seed-0.log"
  while not (log.exists() and "step " in log.read_text()):
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate()
  assert process.returncode == 75, errors
  assert "asked to end (SIGTERM), during tied seed 0" in errors
  assert not (out / "comparison.json").exists()
  done = run(*arguments)
  assert done.returncode == 0, done.stderr
  assert "run       1 of 4" not in done.stdout
  assert "resumed after" in log.read_text()
  assert tables(out) == tables(whole)


def test_a_run_that_dies_is_reported(config, whole):
  arms = ("--arms", "parent", "doomed")
  done = run(config, "--out", whole, *arms)
  assert done.returncode == 1
  for part in (
    "1 of 2 runs died",
    "doomed seed 0 died with exit code 3",
    "updates in a row had to be",
    "--exclude-failed",
  ):
    assert part in done.stderr, (part, done.stderr)
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      ("--arms", "parent", "--seeds", "0", "7", "--report-only"),
      "1 of 2 runs are not done: parent seed 7",
    ),
    (
      ("--arms", "parent", "--training.steps", "50"),
      "training.steps: 60 in the run, 50 now",
    ),
  ],
)
def test_runs_that_are_missing_or_others(config, whole, arguments, message):
  before = sorted(whole.rglob("*"))
  with pytest.raises(ConfigError, match=message):
    command([str(config), "--out", str(whole), *arguments])
  assert sorted(whole.rglob("*")) == before


def test_runs_that_cannot_be_compared_train_no_others(config, whole, tmp_path):
  out = shutil.copytree(whole, tmp_path / "out")
  start = out / "runs/tied/seed-0/start.json"
  values = json.loads(start.read_text())
  values["data"]["order"] = "0" * 64
  start.write_text(json.dumps(values))
  arms = ("--arms", "parent", "tied", "--seeds", "0", "7")
  with pytest.raises(ConfigError, match="its training rows in another order"):
    command([str(config), "--out", str(out), *arms])
  assert not (out / "runs/parent/seed-7").exists()
