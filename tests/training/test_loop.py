import copy
import dataclasses
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from deltajax.checkpoints.huggingface import load_pretrained, save_pretrained
from deltajax.checkpoints.manager import Checkpoints
from deltajax.config import (
  ConfigError,
  DataConfig,
  HostsConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RoutingConfig,
  RunConfig,
  to_dict,
  TrainingConfig,
)
from deltajax.training import metrics as metrics_module
from deltajax.training.load import find_model
from deltajax.training.loop import train
from deltajax.training.metrics import read_metrics
from deltajax.training.run_directory import RunDirectory
from deltajax.training.step import Trainer
from deltajax.training.stopping import PreemptedError, UnhealthyError

ROOT = pathlib.Path(__file__).parents[2]


def tiny_config(
  corpus,
  *,
  model=None,
  data=None,
  optimizer=None,
  mesh=None,
  hosts=None,
  **training,
):
  return RunConfig(
    mesh=mesh or MeshConfig(),
    hosts=hosts or HostsConfig(),
    model=ModelConfig(
      **{
        "vocab_size": 259,
        "width": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "mlp_width": 24,
        "dtype": "float32",
        "routing": RoutingConfig(variant="delta_block", num_blocks=2),
        **(model or {}),
      }
    ),
    data=DataConfig(
      **{
        "dataset": str(corpus),
        "data_dir": str(pathlib.Path(corpus).parents[2]),
        "sequence_length": 32,
        **(data or {}),
      }
    ),
    optimizer=OptimizerConfig(
      **{"learning_rate": 3e-3, "warmup_steps": 4, **(optimizer or {})}
    ),
    training=TrainingConfig(
      **{
        "steps": 20,
        "batch_size": 4,
        "log_every": 1,
        "eval_every": 10,
        "eval_sequences": 8,
        "checkpoint_every": 10,
        **training,
      }
    ),
  )


def quiet(line):
  del line


def metrics(directory):
  return read_metrics(directory / "metrics.jsonl")


def losses(directory):
  return [
    (line["step"], line["train/loss"], line["train/grad_norm"])
    for line in metrics(directory)
    if "train/loss" in line
  ]


SCRIPT = """
import pathlib, sys
from deltajax.training.loop import train
from tests.training.test_loop import quiet, tiny_config
corpus, workdir, stop_after = sys.argv[1:]
train(
  tiny_config(corpus, stop_after=int(stop_after)), pathlib.Path(workdir), quiet
)
"""


@pytest.mark.smoke
def test_resume_in_a_fresh_process_is_bit_exact(corpus, tmp_path):
  whole = train(tiny_config(corpus), tmp_path / "whole", quiet)
  for stop_after in (10, 20):
    subprocess.run(
      [sys.executable, "-c", SCRIPT, corpus, tmp_path / "two", str(stop_after)],
      cwd=ROOT,
      check=True,
    )
    assert losses(tmp_path / "two")[-1][0] == stop_after
  assert losses(tmp_path / "two") == losses(tmp_path / "whole")
  with Checkpoints(tmp_path / "two" / "checkpoints") as saved:
    assert saved.steps()[0] == 20
    state = saved.read(20, whole.state).checked().state
  chex.assert_trees_all_equal(state, whole.state)


def test_a_run_that_died_repeats_nothing_and_skips_nothing(corpus, tmp_path):
  config = tiny_config(corpus, checkpoint_every=5)
  train(config, tmp_path / "whole", quiet)

  class Died(Exception):
    pass

  def die_at_13(line):
    if line.startswith("step 13"):
      raise Died

  with pytest.raises(Died):
    train(config, tmp_path / "died", die_at_13)
  lines = []
  train(config, tmp_path / "died", lines.append)
  assert "resumed after 10 of 20 updates" in lines
  assert losses(tmp_path / "died") == losses(tmp_path / "whole")


def test_a_finished_run_says_so_and_changes_nothing(corpus, tmp_path):
  config = tiny_config(corpus, steps=5)
  first = train(config, tmp_path / "run", quiet)
  before = metrics(tmp_path / "run")
  lines = []
  again = train(config, tmp_path / "run", lines.append)
  assert "resumed after 5 of 5 updates" in lines
  assert again.step == 5
  assert again.validation == first.validation
  assert again.test == first.test
  assert metrics(tmp_path / "run") == before


def test_what_a_run_directory_holds(corpus, tmp_path):
  config = tiny_config(corpus, optimizer={"routing_learning_rate": 6e-3})
  result = train(config, tmp_path / "run", quiet)
  assert RunDirectory(tmp_path / "run").load_config() == config
  steps = [line["step"] for line in metrics(tmp_path / "run")]
  assert steps == sorted(steps)
  validations = [
    line for line in metrics(tmp_path / "run") if "validation/loss" in line
  ]
  assert [line["step"] for line in validations] == [10, 20]
  assert (
    validations[-1]["validation/loss"] == result.validation["validation/loss"]
  )
  assert validations[1]["validation/loss"] < validations[0]["validation/loss"]
  for line in validations:
    # Two layers in two blocks: reads of up to four sources.
    assert 1 / 4 < line["routing/uniform_weight"] <= line["routing/max_weight"]
    assert 0 < line["routing/entropy"] <= line["routing/uniform_entropy"]
  assert list((tmp_path / "run" / "tensorboard").glob("events*"))
  # Once, when the last update is done.
  (test,) = (x for x in metrics(tmp_path / "run") if "test/loss" in x)
  assert test["step"] == 20
  assert {"step": 20, **result.test} == test
  assert test["test/loss"] == pytest.approx(
    result.validation["validation/loss"], rel=0.1
  )
  for line in metrics(tmp_path / "run"):
    if "train/loss" in line:
      base = line["train/learning_rate"]
      assert line["train/routing_learning_rate"] == pytest.approx(2 * base)
  with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
    assert saved.config(20)["model"]["routing"]["variant"] == "delta_block"


def test_variants_see_the_same_batches(corpus, tmp_path):
  def counted_tokens(variant):
    routing = RoutingConfig(variant=variant)
    config = tiny_config(
      corpus, model={"routing": routing, "num_layers": 4}, stop_after=10
    )
    train(config, tmp_path / variant, quiet)
    return [
      line["train/tokens"]
      for line in metrics(tmp_path / variant)
      if "train/tokens" in line
    ]

  tokens = counted_tokens("standard")
  assert len(set(tokens)) > 1  # batches can be told apart by their count
  assert counted_tokens("delta") == tokens


def test_bits_per_byte_of_an_untrained_model_is_that_of_a_uniform_guess(
  corpus, tmp_path
):
  config = tiny_config(
    corpus, steps=1, optimizer={"learning_rate": 1e-12, "warmup_steps": 0}
  )
  result = train(config, tmp_path / "run", quiet)
  np.testing.assert_allclose(
    result.validation["validation/loss"], np.log(259), rtol=1e-2
  )
  # Specials are predicted too but are no bytes: slightly above log2(259).
  bits = result.validation["validation/bits_per_byte"]
  assert np.log2(259) < bits < 1.1 * np.log2(259)


def test_non_finite_loss_stops_and_names_the_last_good_checkpoint(
  corpus, tmp_path
):
  explodes = {"learning_rate": 1e38, "warmup_steps": 10}
  config = tiny_config(corpus, optimizer=explodes, checkpoint_every=1)
  with pytest.raises(UnhealthyError, match=r"skip_limit is 3\); the last good"):
    train(config, tmp_path / "run", quiet)
  with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
    last = saved.steps()[0]
  # The updates before it were made, those after it skipped.
  assert math.isnan(losses(tmp_path / "run")[-1][1])
  for step, loss, _ in losses(tmp_path / "run"):
    assert np.isfinite(loss) == (step <= last)
  assert losses(tmp_path / "run")[-1][0] == last + 4


def test_a_death_before_the_first_checkpoint(corpus, tmp_path):
  config = tiny_config(corpus, stop_after=10)

  def die_at_3(line):
    if line.startswith("step  3"):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train(config, tmp_path / "run", die_at_3)
  train(config, tmp_path / "run", quiet)
  assert [step for step, *_ in losses(tmp_path / "run")] == [*range(1, 11)]


def test_a_torn_last_line_of_metrics_is_dropped(corpus, tmp_path):
  train(tiny_config(corpus, stop_after=10), tmp_path / "run", quiet)
  with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
    file.write('{"step": 11, "train/lo')
  train(tiny_config(corpus), tmp_path / "run", quiet)
  assert [step for step, *_ in losses(tmp_path / "run")] == [*range(1, 21)]


@pytest.mark.parametrize(
  ("model", "message"),
  [
    (
      {"routing": RoutingConfig(variant="delta", num_blocks=2)},
      "model.routing.variant: 'delta_block' in the run, 'delta' now",
    ),
    ({"num_layers": 3}, "model.num_layers: 2 in the run, 3 now"),
  ],
)
def test_a_checkpoint_of_another_config_is_refused(
  corpus, tmp_path, model, message
):
  train(tiny_config(corpus, stop_after=10), tmp_path / "run", quiet)
  other = tmp_path / "other"
  other.mkdir()
  RunDirectory(other).claim(tiny_config(corpus, model=model))
  shutil.copytree(tmp_path / "run" / "checkpoints", other / "checkpoints")
  with pytest.raises(ConfigError, match="checkpoint 10") as error:
    train(tiny_config(corpus, model=model), other, quiet)
  assert message in str(error.value)


def test_leftovers_and_broken_files_of_a_run_directory(corpus, tmp_path):
  directory = RunDirectory(tmp_path)
  (tmp_path / "config.json.tmp").write_text('{"mod')
  # Where the start hung, on any host.
  for host in (0, 11):
    (tmp_path / f"stacks-{host}.txt").touch()
  directory.check(tiny_config(corpus))
  (tmp_path / "config.json").write_text('{"mod')
  with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
    directory.check(tiny_config(corpus))
  (tmp_path / "config.json").write_bytes(b"\xff\xfe")
  with pytest.raises(ConfigError, match=r"config\.json is not JSON: 'utf-8'"):
    directory.check(tiny_config(corpus))
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(ConfigError, match=r"config\.json: RunConfig is \[\]"):
    directory.check(tiny_config(corpus))


def test_float64_needs_x64(corpus, tmp_path):
  config = tiny_config(
    corpus, model={"dtype": "float64", "param_dtype": "float64"}, stop_after=2
  )
  with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
    train(config, tmp_path / "run", quiet)
  assert not (tmp_path / "run").exists()
  with jax.enable_x64(True):
    result = train(config, tmp_path / "run", quiet)
  assert result.state.params["embedding"].dtype == np.float64


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
  """A trained standard model, and the same with routing at identity."""
  directory = tmp_path_factory.mktemp("base")
  standard = {"routing": RoutingConfig(variant="standard")}
  config = tiny_config(corpus, model=standard)
  train(config, directory / "run", quiet)
  model = find_model(directory / "run").load()
  save_pretrained(directory / "plain", *model)
  routing = RoutingConfig(variant="delta_block", num_blocks=2, gate="scalar")
  routed = load_pretrained(directory / "plain", routing)
  save_pretrained(directory / "routed", *routed, layout="deltajax")
  return directory


def started_from(corpus, directory, **training):
  model = dataclasses.replace(find_model(directory).config(), dtype="float32")
  return dataclasses.replace(
    tiny_config(corpus, **training), model=model, init_from=str(directory)
  )


def test_the_first_loss_of_a_converted_model_is_the_base_models(corpus, base):
  first = {}
  for name in ("run", "plain", "routed"):
    config = started_from(corpus, base / name)
    result = train(config, base / f"from-{name}", quiet)
    first[name] = losses(base / f"from-{name}")[0][1]
    assert result.before["step"] == 0
    assert (
      result.validation["validation/loss"] < result.before["validation/loss"]
    )
  assert first["run"] == first["plain"]
  np.testing.assert_allclose(first["routed"], first["plain"], rtol=1e-6)
  last = losses(base / "run")[-1][1]
  assert first["run"] < (last + np.log(259)) / 2


def test_a_given_model_is_read_again_after_a_death(corpus, base, tmp_path):
  config = started_from(corpus, base / "routed")
  whole = train(config, tmp_path / "whole", quiet)

  def die_at_3(line):
    if line.startswith("step  3"):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train(config, tmp_path / "run", die_at_3)
  part = dataclasses.replace(
    config, training=dataclasses.replace(config.training, stop_after=10)
  )
  train(part, tmp_path / "run", quiet)
  resumed = train(config, tmp_path / "run", quiet)
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")
  assert metrics(tmp_path / "run")[0] == resumed.before == whole.before
  chex.assert_trees_all_equal(resumed.state, whole.state)


def test_nothing_to_do_is_said(corpus, tmp_path):
  config = tiny_config(corpus, stop_after=10)
  train(config, tmp_path / "run", quiet)
  lines = []
  train(tiny_config(corpus, stop_after=7), tmp_path / "run", lines.append)
  assert "nothing to do: 10 updates are done, and 7 are asked" in lines


def test_another_runs_directory_is_refused_and_left_alone(corpus, tmp_path):
  train(tiny_config(corpus, steps=5), tmp_path / "run", quiet)
  before = {
    path: path.read_bytes()
    for path in sorted((tmp_path / "run").rglob("*"))
    if path.is_file()
  }
  other = tiny_config(corpus, steps=5, seed=1, model={"num_layers": 3})
  with pytest.raises(ConfigError) as error:
    train(other, tmp_path / "run", quiet)
  assert "model.num_layers: 2 in the run, 3 now" in str(error.value)
  assert "training.seed: 0 in the run, 1 now" in str(error.value)
  after = {
    path: path.read_bytes()
    for path in sorted((tmp_path / "run").rglob("*"))
    if path.is_file()
  }
  assert after == before


def test_a_directory_of_something_else_is_refused(corpus, tmp_path):
  (tmp_path / "letters").mkdir()
  (tmp_path / "letters" / "to_mother.txt").write_text("Dear mother")
  with pytest.raises(ConfigError, match="no run directory"):
    train(tiny_config(corpus), tmp_path / "letters", quiet)
  with pytest.raises(ConfigError, match="is a file"):
    train(tiny_config(corpus), tmp_path / "letters" / "to_mother.txt", quiet)


def contents(directory):
  return {
    path: path.read_bytes()
    for path in sorted(directory.rglob("*"))
    if path.is_file() and path.name != "lock"
  }


def test_changed_data_are_refused_on_resume(corpus, tmp_path):
  config = tiny_config(corpus)
  train(tiny_config(corpus, stop_after=10), tmp_path / "run", quiet)

  def tokenizer(parts):
    parts["tokenizer"] = "words"
    return "\n  tokenizer: words in the checkpoint, bytes now\n"

  def documents(parts):
    parts["sources"][0]["num_documents"] = 7
    return f"data set {corpus}, num_documents: 7 in the checkpoint, 5"

  def unknown(parts):
    del parts["tokenizer"]
    return "fingerprint: of other dat in the checkpoint, "

  with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
    restored = saved.read(10, Trainer(config).init()).checked()
  for step, change in enumerate((tokenizer, documents, unknown), 11):
    with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
      position = copy.deepcopy(restored.data)
      position["fingerprint"] = "of other data"
      message = change(position["parts"])
      saved.save(step, restored.state, position, to_dict(config))
    before = contents(tmp_path / "run")
    # What it would accept is not accepted, as long as it is refused.
    refused = tiny_config(corpus, seed=3, accept=("training.seed",))
    with pytest.raises(ConfigError, match="not those that the run") as error:
      train(refused, tmp_path / "run", quiet)
    assert message in str(error.value)
    assert contents(tmp_path / "run") == before
  accepting = tiny_config(corpus, accept=("data.content",))
  assert train(accepting, tmp_path / "run", quiet).step == 20


def test_a_directory_that_is_in_use_is_not_changed(corpus, tmp_path):
  train(tiny_config(corpus, stop_after=2), tmp_path / "run", quiet)
  before = contents(tmp_path / "run")
  with RunDirectory(tmp_path / "run").locked():
    other = tiny_config(corpus, seed=3, accept=("training.seed",))
    with pytest.raises(ConfigError, match="is in use by process"):
      train(other, tmp_path / "run", quiet)
  assert contents(tmp_path / "run") == before


def test_a_new_run_that_is_refused_leaves_no_directory(corpus, base, tmp_path):
  shutil.copytree(base / "plain", tmp_path / "model")
  (weights,) = (tmp_path / "model").glob("*.safetensors")
  config = started_from(corpus, tmp_path / "model")
  weights.write_bytes(weights.read_bytes()[:-8])
  with pytest.raises(Exception, match="safetensors"):
    train(config, tmp_path / "run", quiet)
  assert not (tmp_path / "run").exists()


def test_a_crash_before_the_config_was_written(corpus, tmp_path):
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  (tmp_path / "run" / "lock").write_text("7 of a host\n")
  assert train(tiny_config(corpus, stop_after=1), tmp_path / "run", quiet)


def test_sigterm_before_the_first_update(corpus, tmp_path):
  def ask(state):
    os.kill(os.getpid(), signal.SIGTERM)

  config = tiny_config(corpus, stop_after=3)
  with pytest.raises(PreemptedError, match="; 0 of 20 updates are done"):
    train(config, tmp_path / "run", quiet, on_start=ask)
  assert not metrics(tmp_path / "run")
  assert train(config, tmp_path / "run", quiet).step == 3


def test_sigterm_at_the_last_update_ends_the_run_as_usual(corpus, tmp_path):
  def ask_at_5(line):
    if line.startswith("step 5/"):
      os.kill(os.getpid(), signal.SIGTERM)

  config = tiny_config(corpus, steps=6, checkpoint_every=100)
  result = train(config, tmp_path / "run", ask_at_5)
  names = [set(x) for x in metrics(tmp_path / "run") if x["step"] == 6]
  assert result.test
  for wanted in ("train/loss", "validation/loss", "test/loss"):
    assert sum(wanted in x for x in names) == 1


@pytest.mark.parametrize("keep_best", [0, 1])
def test_a_validation_that_sigterm_left_out_is_made_up_for(
  corpus, tmp_path, keep_best
):
  options = {"checkpoint_every": 3, "keep_checkpoints": 1}
  config = tiny_config(
    corpus, steps=9, eval_every=3, keep_best=keep_best, **options
  )

  def losses_of(name):
    return [
      (x["step"], x["validation/loss"])
      for x in metrics(tmp_path / name)
      if "validation/loss" in x
    ]

  def ask_at_5(line):  # Metrics are read one update late.
    if line.startswith("step 5/"):
      os.kill(os.getpid(), signal.SIGTERM)

  train(config, tmp_path / "whole", quiet)
  with pytest.raises(PreemptedError, match="6 of 9 updates"):
    train(config, tmp_path / "run", ask_at_5)
  assert len(losses_of("run")) == 1
  stop = dataclasses.replace(config.training, stop_after=7)
  train(dataclasses.replace(config, training=stop), tmp_path / "run", quiet)
  train(config, tmp_path / "run", quiet)
  found = losses_of("run")
  assert [x for x in found if x[0] != 7] == losses_of("whole")


def cut_short(path):
  """Returns the whole file."""
  raw = path.read_bytes()
  path.write_bytes(raw[: len(raw) // 4])
  return raw


@pytest.fixture
def own_data(corpus, tmp_path):
  """A config whose packed rows are its own, and the files of a split."""
  data_dir = tmp_path / "data"
  config = tiny_config(corpus, data={"data_dir": str(data_dir)}, steps=5)

  def file(split):
    (path,) = data_dir.rglob(f"packed-{split}.array_record*")
    return path

  train(config, tmp_path / "first", quiet)
  return config, file


def test_a_damaged_test_split_costs_nothing_else(own_data, tmp_path):
  config, file = own_data
  whole = cut_short(file("test"))
  lines, results = [], []
  result = train(config, tmp_path / "run", lines.append, on_end=results.append)
  assert results == [result]
  assert (result.step, result.test) == (5, {})
  (line,) = (x for x in lines if x.startswith("WARNING"))
  assert "the test split cannot be used: record " in line
  assert str(file("test")) in line
  # It is made up for, once it can be read.
  file("test").write_bytes(whole)
  assert train(config, tmp_path / "run", quiet).test
  assert metrics(tmp_path / "run")[-1].keys() >= {"step", "test/loss"}


def test_damaged_training_rows_end_the_run_by_name(own_data, tmp_path):
  config, file = own_data
  cut_short(file("train"))
  with pytest.raises(
    OSError, match=rf"record \d+ of {file('train')} cannot be"
  ):
    train(
      dataclasses.replace(
        config, training=dataclasses.replace(config.training, steps=20)
      ),
      tmp_path / "run",
      quiet,
    )


def test_data_without_a_test_split(tmp_path):
  (tmp_path / "texts").mkdir()
  for i in range(200):
    (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} " * 20)
  config = tiny_config(
    tmp_path / "texts", data={"data_dir": str(tmp_path / "data")}, steps=5
  )
  lines = []
  assert train(config, tmp_path / "run", lines.append).test == {}
  assert not [x for x in lines if "WARNING" in x]


def test_the_best_are_kept_whenever_checkpoints_are_written(
  corpus, tmp_path, monkeypatch
):
  save, failed = Checkpoints.save, []

  def fail_once(self, step, *args):
    if step == 4 and not failed:
      failed.append(step)
      raise OSError(28, "No space left on device")
    save(self, step, *args)

  monkeypatch.setattr(Checkpoints, "save", fail_once)
  config = tiny_config(
    corpus,
    steps=9,
    optimizer={"learning_rate": 0.3, "warmup_steps": 0},
    **{"eval_every": 7, "checkpoint_every": 4},
    **{"keep_checkpoints": 1, "keep_best": 1},
  )
  train(config, tmp_path / "run", quiet)
  assert failed == [4]
  loss = {
    x["step"]: x["validation/loss"]
    for x in metrics(tmp_path / "run")
    if "validation/loss" in x
  }
  # What could not be written after update 4 was, with a loss of its own, soon.
  written = set(loss) - {4, 7}
  assert written == {5, 8, 9}
  best = min(written, key=loss.get)
  with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
    assert set(saved.steps()) == {best, 9}


def test_weights_and_biases_offline(corpus, tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  for stop_after in (5, 10):
    config = tiny_config(
      corpus, wandb_project="deltajax-tests", stop_after=stop_after
    )
    train(config, tmp_path / "run", quiet)
  # Two sessions of one run, for a later `wandb sync`.
  files = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
  assert len(files) == 2
  identity = (tmp_path / "run" / "wandb" / "id.txt").read_text()
  assert {path.stem for path in files} == {f"run-{identity}"}
  assert all(b"train/loss" in path.read_bytes() for path in files)


class BrokenWandb:
  """Weights & Biases that fail from some call on."""

  def __init__(self, *, good_calls):
    self.good_calls, self.steps = good_calls, []

  def init(self, **options):
    self._call()
    return self

  def log(self, values, step):
    self._call()
    self.steps.append(step)

  def finish(self):
    self._call()

  def _call(self):
    self.good_calls -= 1
    if self.good_calls < 0:
      raise ConnectionError("502 Bad Gateway")


@pytest.mark.parametrize("good_calls", [0, 4])
def test_weights_and_biases_that_fail_end_nothing(corpus, tmp_path, good_calls):
  wandb, lines = BrokenWandb(good_calls=good_calls), []
  config = tiny_config(corpus, wandb_project="deltajax-tests", steps=5)
  with mock.patch.object(metrics_module, "import_wandb", return_value=wandb):
    train(config, tmp_path / "run", lines.append)
  assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5]
  assert wandb.steps == [1, 2, 3][:good_calls]
  first, last = (x for x in lines if x.startswith("WARNING"))
  assert "Weights & Biases failed" in first
  assert "502 Bad Gateway" in first
  lost = len(metrics(tmp_path / "run")) - len(wandb.steps)
  assert f"{lost} lines of metrics are not in Weights & Biases" in last


def test_weights_and_biases_that_are_not_installed(
  corpus, tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, "wandb", None)
  config = tiny_config(corpus, wandb_project="deltajax-tests")
  with pytest.raises(ConfigError, match=r"pip install '.\[wandb\]'"):
    train(config, tmp_path / "run", quiet)
  assert not (tmp_path / "run").exists()


def test_changes_that_are_accepted(corpus, tmp_path):
  train(tiny_config(corpus, stop_after=10), tmp_path / "run", quiet)
  other = {"seed": 5, "steps": 30, "optimizer": {"learning_rate": 1e-3}}
  accept = ("training.seed", "training.steps", "optimizer")
  with pytest.raises(ConfigError, match=r"training\.seed: 0 in the run, 5 now"):
    train(
      tiny_config(corpus, **other, accept=accept[1:]), tmp_path / "run", quiet
    )
  config = tiny_config(corpus, **other, accept=accept)
  lines = []
  train(config, tmp_path / "run", lines.append)
  assert "resumed after 10 of 30 updates" in lines
  # It is the run's own from now on.
  again = tiny_config(corpus, **other)
  assert train(again, tmp_path / "run", quiet).step == 30
  with pytest.raises(ConfigError, match="cannot become another"):
    tiny_config(corpus, accept=("model.width",))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model": {"vocab_size": 100}}, "model.vocab_size is 100.*259"),
    ({"data": {"sequence_length": 10**6}}, "1000001"),
    ({"data": {"dataset": "python_stdlb"}}, "did you mean 'python_stdlib'"),
    ({"data": {"tokenizer": "byte"}}, "did you mean 'bytes'"),
    ({"batch_size": 10**6}, "1000000"),
  ],
)
def test_bad_input_is_named_and_nothing_is_written(
  corpus, tmp_path, change, message
):
  with pytest.raises(ConfigError, match=message):
    train(tiny_config(corpus, **change), tmp_path / "run", quiet)
  assert not (tmp_path / "run").exists()
