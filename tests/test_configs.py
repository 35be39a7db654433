"""Every config file is a valid config, and its model can be shaped."""

import pathlib

import jax
import pytest

from deltajax.checkpoints.names import parameter_shapes
from train.cli import load_config

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path.name for path in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_config_file(name):
  config = load_config(str(ROOT / "configs" / name))
  assert jax.tree.leaves(parameter_shapes(config.model))
  text = (ROOT / "configs" / name).read_text()
  assert f"python -m train.pretrain configs/{name}" in text
