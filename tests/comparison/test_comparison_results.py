"""What runs say, and what is refused; tests/train/test_compare.py trains."""

import dataclasses
import json
import math
import shutil

import pytest

from configs import small
from deltajax.comparison import record, report, runner, tables
from deltajax.comparison.compare import compare
from deltajax.comparison.finished import finished_runs
from deltajax.comparison.plan import Comparison
from deltajax.comparison.record import OUTCOME, START
from deltajax.config import ConfigError
from deltajax.training.run_directory import RunDirectory
from deltajax.training.stopping import RunStopped

# Final losses of arms with seeds 0 and 4.
LOSSES = {
  "standard": (2.0, 2.2),
  "attnres_block": (1.9, 2.15),
  "rd_tied": (1.9, 2.15),
}
STEPS = [20, 40, 60]


def result_of(comparison, out, **options):
  runs = comparison.runs(out)
  failures = [x for x in map(runner.find_failure, runs) if x is not None]
  options = {"exclude_failed": False, **options}
  return compare(comparison, finished_runs(runs, failures, **options), failures)


@pytest.fixture(scope="module")
def comparison():
  base = small.get_config()
  base = dataclasses.replace(
    base,
    optimizer=dataclasses.replace(base.optimizer, warmup_steps=10),
    training=dataclasses.replace(base.training, steps=60, log_every=20),
  )
  return Comparison(
    base=base,
    arms={
      name: {"model.routing.variant": name, "optimizer.learning_rate": 2e-3}
      for name in LOSSES
    },
    baseline="standard",
    pairs={"rd_tied": ("attnres_block",)},
    seeds=(0, 4),
  )


def write_run(run, loss):
  """What a run leaves that ended with this loss."""
  directory = RunDirectory(run.directory)
  directory.claim(run.config)
  routes = run.arm != "standard"
  record.write(
    directory.root / START,
    record.Start(
      data=record.DataIdentity(
        train="7" * 64,
        order=str(run.seed) * 64,
        validation="8" * 64,
        validation_tokens=4096,
      ),
      shared={
        name: f"[2, 4] float32 {run.seed}{name}" for name in ("mlp", "norm")
      },
      parameters=1000 + 20 * routes,
      routing_parameters=20 * routes,
      environment={
        "python": "3.11.7",
        "jax": "0.10.2",
        "deltajax": "0.1.0",
        "commit": "8018761" + 33 * "0",
        "changed": "False",
        "devices": "1 x cpu",
        "machine": "x86_64",
        "cpus": "2",
      },
    ),
  )
  validation = {
    "validation/loss": loss,
    "validation/perplexity": math.exp(loss),
    "validation/bits_per_byte": loss / math.log(2),
  }
  record.write(
    directory.root / OUTCOME,
    record.Outcome(
      step=60,
      validation=validation,
      skipped=0,
      peak_step_bytes=2**20 * (3 if routes else 2),
    ),
  )
  routing = {"routing/max_weight": 0.6, "routing/uniform_weight": 0.3}
  lines = [
    {
      "step": step,
      "train/loss": loss + 1 / step,
      "train/tokens_per_second": 1000 - 200 * routes + step,
    }
    for step in STEPS
  ]
  lines.append({"step": 60, **validation, **(routing if routes else {})})
  directory.metrics.write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.fixture(scope="module")
def trained(comparison, tmp_path_factory):
  out = tmp_path_factory.mktemp("comparison") / "out"
  for run in comparison.runs(out):
    write_run(run, LOSSES[run.arm][comparison.seeds.index(run.seed)])
  return out


@pytest.fixture
def copy(trained, tmp_path):
  """A directory of runs that a test may spoil."""
  return shutil.copytree(trained, tmp_path / "out")


def test_what_is_reported(comparison, trained):
  result = result_of(comparison, trained)
  first, second, third = result.pairs
  assert [(x.arm, x.baseline) for x in result.pairs] == [
    ("attnres_block", "standard"),
    ("rd_tied", "standard"),
    ("rd_tied", "attnres_block"),
  ]
  assert first.seeds == [0, 4]
  assert first.differences == pytest.approx([-0.1, -0.05])
  assert second.differences == first.differences
  assert third.differences == [0, 0]
  assert first.perplexity_change == pytest.approx(100 * math.expm1(-0.075))
  assert first.bits_per_byte == pytest.approx(-0.075 / math.log(2))
  assert first.parameter_change == pytest.approx(2)
  assert first.shared_parameters == 2
  assert first.training.steps == STEPS
  assert first.training.values == pytest.approx([-0.075] * 3)
  arm, plain = result.arm("attnres_block"), result.arm("standard")
  assert arm.mean_loss == pytest.approx(2.025)
  assert arm.runs[1].training.values == pytest.approx(
    [2.15 + 1 / step for step in STEPS]
  )
  assert arm.runs[1].validation.steps == [60]
  assert arm.bits_per_byte == pytest.approx(2.025 / math.log(2))
  assert arm.routing == pytest.approx(
    {"max_weight": 0.6, "uniform_weight": 0.3}
  )
  assert plain.routing == {}
  cost = result.costs[1]
  assert cost.relative_speed == pytest.approx(840 / 1040)
  assert (result.memory_of, cost.relative_memory) == ("step", 1.5)
  assert result.train_tokens == 60 * 8 * 128


def test_memory_is_that_of_the_device_where_it_tells(comparison, copy):
  for run in comparison.runs(copy):
    peak = 100 + 50 * (run.arm == "rd_tied")
    add_line(run.directory, **{"step": 60, "train/peak_bytes": peak})
  result = result_of(comparison, copy)
  assert result.memory_of == "device"
  assert [cost.relative_memory for cost in result.costs] == [1, 1, 1.5]


def test_what_is_written(comparison, copy):
  result = result_of(comparison, copy)
  report.write_report(copy, comparison, result)
  report.check_output(copy)
  values = json.loads((copy / report.JSON_NAME).read_text())
  assert values["schema"] == "deltajax.comparison"
  assert values["pairs"][2]["differences"] == result.pairs[2].differences
  text = (copy / report.MARKDOWN_NAME).read_text()
  assert "`optimizer.learning_rate` 0.002" in text
  assert text == tables.markdown(result)
  pictures = {path.name for path in (copy / "figures").glob("*.png")}
  assert pictures == {"differences.png", "losses.png", "curves.png"}


def test_one_seed_has_no_intervals(comparison, copy):
  part = comparison.narrowed([], [4])
  result = result_of(part, copy)
  assert result.pairs[0].statistics.t_interval is None
  report.write_report(copy, part, result)
  assert "| - |" in (copy / report.MARKDOWN_NAME).read_text()


def test_one_arm_has_no_pairs(comparison, copy):
  part = comparison.narrowed(["rd_tied"], [])
  result = result_of(part, copy)
  assert (result.baseline, result.pairs) == ("rd_tied", [])
  report.write_report(copy, part, result)
  assert not (copy / "figures/differences.png").exists()


def spoil(path, change):
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))


@pytest.mark.parametrize(
  ("field", "message"),
  [
    ("train", "attnres_block seed 4 read other training rows than standard"),
    ("validation", "attnres_block seed 4 read other validation batches than"),
    ("order", "attnres_block seed 4 read its training rows in another order"),
  ],
)
def test_runs_on_other_data_are_refused(comparison, copy, field, message):
  def change(values):
    values["data"][field] = "0" * 64

  spoil(copy / "runs/attnres_block/seed-4" / START, change)
  with pytest.raises(ConfigError, match=message) as error:
    result_of(comparison, copy)
  assert "000000000000, not " in str(error.value)


def test_other_initial_parameters_are_refused(comparison, copy):
  def change(values):
    name = "mlp"
    values["shared"][name] = values["shared"][name][:-1] + "x"

  spoil(copy / "runs/rd_tied/seed-0" / START, change)
  with pytest.raises(
    ConfigError,
    match=r"standard seed 0 and rd_tied seed 0 began .* mlp",
  ):
    result_of(comparison, copy)


@pytest.mark.parametrize("name", [START, OUTCOME])
@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"step": 60, "more": 1}'])
def test_damaged_records_are_told(comparison, copy, name, text):
  path = copy / "runs/rd_tied/seed-0" / name
  path.write_text(text)
  message = f"{path} cannot be read: .*Is it a run of train.compare"
  with pytest.raises(ConfigError, match=message):
    result_of(comparison, copy)


def test_another_shape_is_not_shared(comparison, copy):
  def change(values):
    name = "mlp"
    values["shared"][name] = "[2, 16, 99] float32 " + "0" * 64

  for seed in (0, 4):
    spoil(copy / f"runs/rd_tied/seed-{seed}" / START, change)
  assert result_of(comparison, copy).pairs[1].shared_parameters == 1


def add_line(run, **values):
  with (run / "metrics.jsonl").open("a") as file:
    file.write(json.dumps(values) + "\n")


def test_another_interval_of_logging_is_refused(comparison, copy):
  add_line(copy / "runs/rd_tied/seed-4", **{"step": 60, "train/loss": 2.0})
  with pytest.raises(
    ConfigError, match=r"rd_tied seed 4 logged .* training\.log_every"
  ):
    result_of(comparison, copy)


def test_a_skipped_update_has_no_loss_of_its_own(comparison, copy):
  path = copy / "runs/rd_tied/seed-4/metrics.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[1]["train/loss"] = math.nan
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  result = result_of(comparison, copy)
  first, second, third = result.arm("rd_tied").runs[1].training.values
  assert second == pytest.approx((first + third) / 2)
  report.write_report(copy, comparison, result)


def test_missing_seeds_are_named(comparison, trained):
  wanted = dataclasses.replace(comparison, seeds=(0, 4, 5))
  with pytest.raises(
    ConfigError,
    match="3 of 9 runs are not done: standard "
    "seed 5, attnres_block seed 5, rd_tied seed 5",
  ):
    result_of(wanted, trained)


def test_another_config_is_refused(comparison, trained):
  changed = dataclasses.replace(
    comparison,
    arms={**comparison.arms, "rd_tied": {"model.routing.variant": "delta"}},
  )
  with pytest.raises(ConfigError) as error:
    runner.check_runs(changed.runs(trained))
  assert "runs/rd_tied/seed-0 belongs to another run" in str(error.value)
  assert "'rd_tied' in the run, 'delta' now" in str(error.value)


def died(out, arm, seed, exit_code):
  (out / f"runs/{arm}/seed-{seed}" / OUTCOME).unlink()
  logs = out / "logs" / arm
  logs.mkdir(parents=True)
  (logs / f"seed-{seed}.log").write_text("step 3\nstopped: out of luck\n")
  (logs / f"seed-{seed}.exit").write_text(f"{exit_code}\n")


def test_runs_that_died_are_left_out_only_when_told(comparison, copy):
  died(copy, "rd_tied", 4, -9)
  with pytest.raises(RunStopped) as error:
    result_of(comparison, copy)
  for part in ("rd_tied seed 4 died with signal 9", "out of luck"):
    assert part in str(error.value)
  result = result_of(comparison, copy, exclude_failed=True)
  assert result.excluded == [{"arm": "rd_tied", "seed": 4, "exit_code": -9}]
  assert result.pairs[0].seeds == [0, 4]
  assert result.pairs[2].seeds == [0]
  # It is ranked by the seeds that all have.
  means = {arm.name: arm.mean_loss for arm in result.arms}
  assert means == pytest.approx(
    {"standard": 2.0, "attnres_block": 1.9, "rd_tied": 1.9}
  )
  for arm in result.arms:
    assert arm.bits_per_byte == pytest.approx(arm.mean_loss / math.log(2))
  report.write_report(copy, comparison, result)
  text = tables.markdown(result)
  assert "Left out, because they died: rd_tied seed 4 (exit code -9)" in text
  assert "| died |" in text


def test_another_optimizer_is_told(comparison, copy):
  assert "†" not in tables.markdown(result_of(comparison, copy))
  arms = {
    **comparison.arms,
    "rd_tied": {
      **comparison.arms["rd_tied"],
      "optimizer.learning_rate": 9e-3,
    },
  }
  text = tables.markdown(
    result_of(dataclasses.replace(comparison, arms=arms), copy)
  )
  assert "Arms marked † were trained with another optimizer" in text
  assert text.count("| rd_tied † | ") == 2
  assert "| attnres_block † | " not in text


def test_another_commit_is_told(comparison, copy):
  def change(values):
    values["environment"]["commit"] = "f00dfeed" + 32 * "0"

  spoil(copy / "runs/rd_tied/seed-0" / START, change)
  text = tables.markdown(result_of(comparison, copy))
  assert "made in 2 unequal environments: commit 8018761" in text
  assert ", f00dfeed" in text
  assert "deltajax 0.1.0 (commit 801876100000)" in text


def test_no_seed_that_all_arms_have(comparison, copy):
  died(copy, "rd_tied", 4, 3)
  died(copy, "attnres_block", 0, 3)
  with pytest.raises(ConfigError, match="no seed is left"):
    result_of(comparison, copy, exclude_failed=True)


def test_an_arm_of_which_nothing_is_left(comparison, copy):
  part = comparison.narrowed([], [4])
  died(copy, "rd_tied", 4, 3)
  with pytest.raises(ConfigError, match="all runs of arm rd_tied died"):
    result_of(part, copy, exclude_failed=True)


def test_what_a_kill_leaves_is_no_hindrance(copy):
  (copy / "comparison.json.tmp").write_text("{")
  report.check_output(copy)


def test_output_that_is_something_else(tmp_path):
  (tmp_path / "thesis.tex").touch()
  with pytest.raises(ConfigError, match=r"'thesis\.tex', which is no part"):
    report.check_output(tmp_path)
  with pytest.raises(ConfigError, match="is a file"):
    report.check_output(tmp_path / "thesis.tex")
