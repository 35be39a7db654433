"""Every config file is a valid config, and its model can be shaped."""

import pathlib
import re

import jax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study
from deltajax.training.load import ModelDirectory
from train.cli import load_config, load_typed

ROOT = pathlib.Path(__file__).parents[1]
FILES = {path.name for path in (ROOT / "configs").glob("*.py")}
FINETUNE = {name for name in FILES if name.startswith("finetune_")}
COMPARISONS = {name for name in FILES if name.startswith("compare_")}
STUDIES = {name for name in FILES if name.startswith("study")}
RUNS = FILES - FINETUNE - COMPARISONS - STUDIES
# Made for any machine.
LOCAL = {"quickstart.py", "small.py"}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_config_file(name):
  config = load_config(str(ROOT / "configs" / name))
  assert jax.tree.leaves(parameter_shapes(config.model))
  text = (ROOT / "configs" / name).read_text()
  assert f"python -m train.pretrain configs/{name}" in text


@pytest.mark.parametrize("name", sorted(FINETUNE))
def test_recipe_for_any_model(name):
  base = ModelDirectory(ROOT / "tests/testdata/huggingface/llama-tied")
  config = load_config(str(ROOT / "configs" / name), base)
  assert config.model == base.config()
  text = (ROOT / "configs" / name).read_text()
  assert f"python -m train.finetune configs/{name}" in text


@pytest.mark.parametrize("name", sorted(COMPARISONS))
def test_comparison(name):
  comparison = load_typed(str(ROOT / "configs" / name), Comparison)
  assert comparison.base == load_config(str(ROOT / "configs/small.py"))
  assert len(comparison.seeds) >= 3
  text = (ROOT / "configs" / name).read_text()
  assert f"python -m train.compare configs/{name}" in text


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_study(name):
  study = load_typed(str(ROOT / "configs" / name), Study)
  first = {arm: next(iter(study.candidates)) for arm in study.groups}
  tuned = study.tuned(first)
  # Every arm has a schedule that was tuned, and nothing else was changed.
  groups = {member: arm for arm, x in study.groups.items() for member in x}
  for arm, overrides in tuned.arms.items():
    schedule = study.candidates[first[groups[arm]]]
    assert overrides == study.comparison.arms[arm] | schedule
  text = (ROOT / "configs" / name).read_text()
  assert f"python -m train.study configs/{name}" in text


@pytest.mark.parametrize("name", sorted(RUNS - LOCAL))
def test_recipes_say_how_to_compile_them(name):
  text = (ROOT / "configs" / name).read_text()
  text = re.sub(r"[\s\\]+", " ", text)
  assert f"python -m train.compile_ahead configs/{name} --topology" in text
  assert re.search(
    r"Expected on each chip: [\d.]+ GiB of [\d.]+ at peak \(arguments", text
  )


def test_recipes_build_the_corpus_that_they_read_each_in_its_place():
  """A directory of packed rows is of one tokenizer and one length."""
  held = {}
  for name in sorted(RUNS - LOCAL):
    data = load_config(str(ROOT / "configs" / name)).data
    text = (ROOT / "configs" / name).read_text()
    command = (
      f"build {data.dataset} --sources fineweb-edu/ --validation 0.001"
      f" --tokenizer {data.tokenizer} --sequence-length {data.sequence_length}"
    )
    assert command in re.sub(r"[\s\\]+", " ", text), name
    rows = (data.tokenizer, data.sequence_length)
    assert held.setdefault(data.dataset, rows) == rows, name
