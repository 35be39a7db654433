"""The command as a user runs it, and what it refuses before any work."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

import deltajax
from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.data.prepare import Corpus, prepare
from deltajax.data.split_plan import Fractions
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.training.load import find_model
from tests.evaluation.test_harness import check_results, DATA, TASKS
from tests.helpers import EIGHT_DEVICES, QUICK_FLAGS, ROOT, run_module
from tests.train.places import make_run
from train.evaluate import command

BYTES = ByteTokenizer()
TEXTS = [f"line {i} of a text, " * (1 + i % 5) for i in range(40)]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  """A run of two updates."""
  model = {"num_kv_heads": 2, "vocab_size": 260}
  workdir = tmp_path_factory.mktemp("runs") / "run"
  return make_run(corpus, workdir, model=model)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """A file of JSON lines."""
  path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
  path.write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
  return path


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
  """A packed set for other sequences than the run's."""
  out = tmp_path_factory.mktemp("prepared") / "set"
  corpus = Corpus(
    sources=(str(texts),),
    tokenizer="bytes",
    sequence_length=20,
    fractions=Fractions(validation=0.3, test=0.3),
  )
  prepare(corpus, out, workers=0, log=lambda line: None)
  return out


def evaluate(source, *arguments, out):
  """What the command writes."""
  command([str(source), *map(str, arguments), "--out", str(out)])
  return json.loads(out.read_text())


def check_documented(value):
  """The documentation names every field, but for the config's own."""
  docs = (ROOT / "docs" / "evaluation.md").read_text()
  if isinstance(value, dict):
    for name, x in value.items():
      assert f"`{name}`" in docs, name
      if name != "config":
        check_documented(x)
  elif isinstance(value, list):
    for x in value:
      check_documented(x)


def test_without_more_it_is_the_runs_own_validation(run, tmp_path, capsys):
  found = evaluate(run, out=tmp_path / "out.json")
  printed = capsys.readouterr().out
  assert f"model     run {run} after 2 updates" in printed
  assert "split validation: 8 of 8 rows" in printed
  lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
  (last,) = [x for x in lines if x["step"] == 2 and "validation/loss" in x]
  (text,) = found["texts"]
  for name in ("loss", "perplexity", "bits_per_byte"):
    expected = last[f"validation/{name}"]
    np.testing.assert_allclose(text[name]["value"], expected, rtol=1e-6)
    assert f"{text[name]['value']:.4f} +- " in printed
    assert 0 < text[name]["standard_error"] < expected
  assert (text["unit"], text["units"], text["coverage"]) == ("row", 8, "rows")
  assert math.isclose(
    text["bits_per_byte"]["value"],
    text["loss"]["value"] * text["tokens"] / text["bytes"] / math.log(2),
  )
  config = json.loads((run / "config.json").read_text())
  assert text["data"]["datasets"] == [config["data"]["dataset"]]
  model, code = found["model"], found["code"]
  assert model["config"] == config["model"]
  assert model["source"] == f"run {run} after 2 updates"
  assert code["deltajax"] == deltajax.__version__
  assert code["jax"] == jax.__version__
  assert (found["schema"], found["version"]) == ("deltajax.evaluation", 1)
  assert found["tasks"] == found["groups"] == found["notes"] == []
  check_documented(found)
  # Another checkpoint is another model; the same one is the same.
  first = evaluate(run / "checkpoints" / "1", out=tmp_path / "1.json")
  assert first["model"]["config_digest"] == model["config_digest"]
  assert first["model"]["parameters_digest"] != model["parameters_digest"]
  stored = find_model(run).load()
  save_pretrained(tmp_path / "model", *stored, layout="deltajax")
  arguments = ("--data", config["data"]["dataset"], "--tokenizer", "bytes")
  arguments = (*arguments, "--context", "32")
  again = evaluate(tmp_path / "model", *arguments, out=tmp_path / "again.json")
  for name in ("config_digest", "parameters_digest", "parameters"):
    assert again["model"][name] == model[name]


def test_what_cannot_be_trained_can_be_evaluated(run, tmp_path):
  """Without gradients, float16 and norms without an epsilon are good."""
  plain = evaluate(run, out=tmp_path / "plain.json")
  config, params = find_model(run).load()
  odd = dataclasses.replace(config, norm_eps=0.0, param_dtype="bfloat16")
  save_pretrained(tmp_path / "odd", odd, params, layout="deltajax")
  dataset = plain["texts"][0]["data"]["datasets"][0]
  data = ("--data", dataset, "--tokenizer", "bytes", "--context", 32)
  for source, options, dtype in (
    (run, (), "float16"),
    (tmp_path / "odd", (*data, "--max-tokens", 99999), "float32"),
  ):
    options = (*options, "--dtype", dtype)
    found = evaluate(source, *options, out=tmp_path / "found.json")
    assert found["model"]["dtype"] == dtype
    loss = found["texts"][0]["loss"]["value"]
    assert abs(loss - plain["texts"][0]["loss"]["value"]) < 0.1


def test_windows_over_files_of_text(run, texts, tmp_path):
  options = ("--data", texts, "--context", 24, "--stride", 7)
  (text,) = evaluate(run, *options, out=tmp_path / "out.json")["texts"]
  config, params = find_model(run).load()
  expected = deltajax.evaluate(
    deltajax.TransformerLM(config),
    params,
    [[BYTES.bos_id, *BYTES.encode(x), BYTES.eos_id] for x in TEXTS],
    context=24,
    stride=7,
    bytes_per_token=BYTES.bytes_per_token,
  )
  assert text["bytes"] == expected.bytes == sum(len(x.encode()) for x in TEXTS)
  assert text["tokens"] == expected.tokens
  assert (text["unit"], text["units"]) == ("document", len(TEXTS))
  assert (text["coverage"], text["context"], text["stride"]) == (
    *("windows", 24, 7),
  )
  assert text["data"]["split"] == "all"
  for name in ("loss", "bits_per_byte"):
    x, y = text[name], getattr(expected, name)
    np.testing.assert_allclose(x["value"], y.value, rtol=1e-5)
    np.testing.assert_allclose(x["standard_error"], y.standard_error, rtol=1e-3)


def test_data_sets_one_by_one(run, texts, prepared, corpus, tmp_path):
  data = [str(x) for x in (texts, prepared, corpus)]
  rows = evaluate(run, "--data", *data, out=tmp_path / "rows.json")["texts"]
  # The prepared set says how long its rows are; the others take the run's.
  assert [text["context"] for text in rows] == [32, 20, 32]
  assert [text["data"]["split"] for text in rows] == [
    *("all", "validation", "validation"),
  ]
  assert [text["data"]["datasets"] for text in rows] == [[x] for x in data]
  options = ("--data", prepared, "--split", "test", "--stride", 8)
  (text,) = evaluate(run, *options, out=tmp_path / "test.json")["texts"]
  manifest = json.loads((prepared / "manifest.json").read_text())
  test = manifest["splits"]["test"]
  assert text["units"] == test["num_documents"]
  assert text["tokens"] == test["num_tokens"] - test["num_documents"]
  assert text["data"]["fingerprint"] == test["fingerprint"]
  fewer = ("--max-tokens", text["tokens"] - 1)
  (some,) = evaluate(run, *options, *fewer, out=tmp_path / "some.json")["texts"]
  assert some["units"] == text["units"] - 1
  (two,) = evaluate(run, "--rows", "2", out=tmp_path / "two.json")["texts"]
  assert two["units"] == 2


def test_a_mesh_of_8_devices_finds_what_one_device_does(run, texts, tmp_path):
  one, many = tmp_path / "one.json", tmp_path / "many.json"
  axes = ("--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "2")
  axes = (*axes, "--mesh.context", "2")
  flags = f"{EIGHT_DEVICES['XLA_FLAGS']} {QUICK_FLAGS}"
  for options in ((), ("--data", texts, "--context", "16", "--stride", "5")):
    expected = evaluate(run, *options, out=one)
    done = run_module(
      "train.evaluate",
      *(run, *options, *axes, "--out", many),
      env={"XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(many.read_text())
    digest = expected["model"]["parameters_digest"]
    assert found["model"]["parameters_digest"] == digest
    (x,), (y,) = found["texts"], expected["texts"]
    assert x["tokens"] == y["tokens"]
    for name in ("loss", "bits_per_byte"):
      for key in ("value", "standard_error"):
        np.testing.assert_allclose(x[name][key], y[name][key], rtol=1e-3)


def test_tasks(tmp_path, capsys):
  pytest.importorskip("lm_eval")
  options = ("--tasks", *TASKS, "--include-path", DATA / "tasks")
  found = evaluate(DATA / "model", *options, out=tmp_path / "out.json")
  stored = json.loads((DATA / "references.json").read_text())
  check_results(found, stored["results"])
  assert found["texts"] == []
  check_documented(found)
  assert found["model"]["dtype"] == "float32"
  table = capsys.readouterr().out
  assert re.search(r"^local_choice +acc +none +0\.5000 +0\.15", table, re.M)


def test_tasks_on_a_mesh_of_8_devices(tmp_path):
  pytest.importorskip("lm_eval")
  out = tmp_path / "out.json"
  done = run_module(
    "train.evaluate",
    *(DATA / "model", "--tasks", *TASKS, "--include-path", DATA / "tasks"),
    *("--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "2"),
    *("--mesh.context", "2", "--batch-size", "6", "--out", out),
    env={"XLA_FLAGS": f"{EIGHT_DEVICES['XLA_FLAGS']} {QUICK_FLAGS}"},
  )
  assert done.returncode == 0, done.stderr
  stored = json.loads((DATA / "references.json").read_text())
  check_results(json.loads(out.read_text()), stored["results"])


def test_a_longer_context_than_that_of_training_is_told(run, tmp_path, capsys):
  found = evaluate(run, "--context", "40", out=tmp_path / "out.json")
  (note,) = found["notes"]
  assert "a context of 40 tokens is more than the 32" in note
  assert f"note      {note}" in capsys.readouterr().out
