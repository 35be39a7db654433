"""Commands of the tutorials run, as they stand, on a small run and model."""

import json

import pytest

from deltajax import testing
from tests.docs.test_code import commands

SMALLER = (
  *("--model.num-layers", "4", "--model.width", "32"),
  *("--training.eval-sequences", "9", "--training.no-eval-routing"),
  *("--optimizer.warmup-steps", "1"),
)


def shown(page):
  """All commands of a tutorial, as words."""
  return [
    ["python", "-m", module, *words]
    for module, words in commands(f"docs/tutorials/{page}.md")
  ]


def with_steps(command, steps):
  """A command that trains, with another number of updates."""
  words = list(command)
  if "--training.steps" in words:
    words[words.index("--training.steps") + 1] = str(steps)
    return words
  return [*words, "--training.steps", str(steps)]


@pytest.mark.usefixtures("quick_compiles")
def test_from_training_to_reports(run_command, corpus, tmp_path):
  small = (*SMALLER, "--data.dataset", corpus)
  first, attnres, _, longer = shown("pretrain")
  assert "after 2 updates" in run_command(with_steps(first, 2), *small)
  printed = run_command(with_steps(attnres, 2), *small)
  assert "routing   attnres_block" in printed
  printed = run_command(with_steps(longer, 3), *small)
  assert "resumed after" in printed
  assert "after 3 updates" in printed

  validation, everything, other, _ = shown("evaluate")
  assert "bits per byte" in run_command(validation)
  run_command(everything)
  assert json.loads((tmp_path / "results.json").read_text())
  texts = [json.dumps({"text": f"def f(x):\n  return {i}\n"}) for i in range(9)]
  (tmp_path / "texts.jsonl").write_text("\n".join(texts))
  assert "bits per byte" in run_command(other)

  for command in shown("analyze"):
    printed = run_command(command, "--rows", "4")
    assert f"numbers   {command[-1]}/routing.json" in printed
    assert (tmp_path / command[-1] / "report.html").exists()

  sample, _ = shown("generate")
  assert run_command(sample, "--max-new-tokens", 3).startswith("def ")


@pytest.mark.usefixtures("quick_compiles")
def test_a_model_directory(run_command, tmp_path):
  """The rest of convert.md and finetune.md is in the README, too."""
  testing.write_model(tmp_path / "runs/smollm2")
  inspect = shown("convert")[0]
  assert "parameters" in run_command(inspect)
  _, prompt = shown("generate")
  assert run_command(prompt).startswith("The capital of France is")


@pytest.mark.usefixtures("quick_compiles")
def test_from_texts_to_a_run(run_command, tmp_path):
  (tmp_path / "texts").mkdir()
  for i in range(60):
    (tmp_path / f"texts/{i}.txt").write_text(f"The {i}th text. " * (20 + i % 7))
  build, inspect, pretrain = shown("prepare_data")
  assert "60 documents" in run_command(build)
  assert "tokens with bos and eos" in run_command(inspect)
  assert "after 2 updates" in run_command(with_steps(pretrain, 2), *SMALLER)
