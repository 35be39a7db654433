"""The model of what a command is given: run, checkpoint or model directory."""

import dataclasses
import pathlib
from typing import Any

from deltajax.checkpoints.config_json import is_model_directory
from deltajax.checkpoints.huggingface import (
  load_config,
  load_pretrained,
  Pretrained,
)
from deltajax.checkpoints.manager import Checkpoints
from deltajax.checkpoints.names import parameter_shapes
from deltajax.config import ConfigError, from_dict, ModelConfig, RunConfig
from deltajax.training.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class ModelDirectory:
  """A model in a directory of its own.

  Attributes:
    path: of the directory.
  """

  path: pathlib.Path

  def config(self) -> ModelConfig:
    """Of the model."""
    return load_config(self.path)

  def load(self) -> Pretrained:
    """The model, in the dtype that it is stored in."""
    return load_pretrained(self.path, param_dtype=None)

  def __str__(self) -> str:
    return f"directory {self.path}"


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
  """The model of one checkpoint of a run.

  Attributes:
    run: the run's directory.
    step: completed updates.
  """

  run: RunDirectory
  step: int

  def config(self) -> ModelConfig:
    """Of the model."""
    with self._open() as saved:
      return from_dict(RunConfig, saved.config(self.step)).model

  def load(self) -> Pretrained:
    """The model, without the state of its optimizer."""
    config = self.config()
    with self._open() as saved:
      params: Any = saved.restore_params(self.step, parameter_shapes(config))
    return Pretrained(config, params)

  def __str__(self) -> str:
    return f"run       {self.run.root} after {self.step} updates"

  def _open(self) -> Checkpoints:
    return Checkpoints(self.run.checkpoints, read_only=True)


def find_model(path: pathlib.Path) -> ModelDirectory | RunCheckpoint:
  """Finds a model; nothing is loaded yet.

  Args:
    path: a model directory, a run's directory, for its newest checkpoint, or
      the directory of one of its checkpoints.

  Raises:
    ConfigError: if it is none of these.
  """
  if not path.is_dir():
    raise ConfigError(f"there is no directory {path}.")
  if is_model_directory(path):
    return ModelDirectory(path)
  step = None
  run = RunDirectory(path)
  if path.name.isdigit() and path.parent.name == run.checkpoints.name:
    step, run = int(path.name), RunDirectory(path.parent.parent)
  if not run.checkpoints.is_dir():
    raise ConfigError(
      f"{path} is neither a model directory, whose config.json has a"
      " model_type, nor a run with checkpoints."
    )
  if step is None:
    with Checkpoints(run.checkpoints, read_only=True) as saved:
      step = saved.latest_step()
  if step is None:
    raise ConfigError(f"{run.root} has no complete checkpoint.")
  return RunCheckpoint(run, step)
