"""Every config file is a valid config, and its model can be shaped."""

import pathlib
import re

import jax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.training.load import ModelDirectory
from train.cli import load_config

ROOT = pathlib.Path(__file__).parents[1]
FILES = {path.name for path in (ROOT / "configs").glob("*.py")}
FINETUNE = {name for name in FILES if name.startswith("finetune_")}


@pytest.mark.parametrize("name", sorted(FILES - FINETUNE))
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


@pytest.mark.parametrize("name", sorted(FILES - FINETUNE - {"quickstart.py"}))
def test_recipes_say_how_to_compile_them(name):
  text = (ROOT / "configs" / name).read_text()
  text = re.sub(r"[\s\\]+", " ", text)
  assert f"python -m train.compile_ahead configs/{name} --topology" in text
  assert re.search(
    r"Expected on each chip: [\d.]+ GiB of [\d.]+ at peak \(arguments", text
  )
