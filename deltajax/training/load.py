"""The model of what a command is given: run, checkpoint or model directory."""

import dataclasses
import json
import pathlib
from typing import Any

import jax

from deltajax.checkpoints.config_json import is_model_directory
from deltajax.checkpoints.huggingface import (
  load_config,
  load_pretrained,
  Pretrained,
)
from deltajax.checkpoints.names import parameter_shapes
from deltajax.checkpoints.reading import (
  complete_steps,
  read_params,
  read_values,
)
from deltajax.config import (
  ConfigError,
  differences,
  from_dict,
  ModelConfig,
  RunConfig,
)
from deltajax.training import hosts
from deltajax.training.run_directory import RunDirectory

# How a model is computed or was initialised, not which one it is.
NOT_THE_MODEL = frozenset(
  {
    *("dtype", "param_dtype", "remat", "scan", "read_group"),
    *("depth_attention", "attention", "init_std", "routing.query_init_std"),
  }
)


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

  @property
  def tokenizer(self) -> str:
    """The path of its tokenizer, as `get_tokenizer` takes it."""
    return f"{self.path.absolute()}/"

  @property
  def context(self) -> int | None:
    """Tokens that it was trained to see; None if nothing says."""
    values = json.loads((self.path / "config.json").read_text())
    return values.get("max_position_embeddings")

  @property
  def origin(self) -> pathlib.Path | None:
    """The model directory whose tokenizer's files belong to it."""
    return self.path

  def load(self, like: Any = None) -> Pretrained:
    """The model, in the dtype that it is stored in; all hosts must ask.

    Args:
      like: ShapeDtypeStructs that say where parameters lie and in which dtype.
    """
    dtype = shardings = None
    if like is not None:
      dtype = str(jax.tree.leaves(like)[0].dtype)
      shardings = jax.tree.map(lambda x: x.sharding, like)
    return hosts.together(
      lambda: load_pretrained(self.path, param_dtype=dtype, shardings=shardings)
    )

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
    values = read_values(self.run.checkpoints, self.step)
    return from_dict(RunConfig, values.config).model

  @property
  def tokenizer(self) -> str:
    """The name or path of its tokenizer, as `get_tokenizer` takes it."""
    return self.run.load_config().data.tokenizer

  @property
  def context(self) -> int | None:
    """Tokens that it was trained to see."""
    return self.run.load_config().data.sequence_length

  @property
  def origin(self) -> pathlib.Path | None:
    """The model directory whose tokenizer's files belong to it.

    The one that the run started with, if it is there; else None.
    """
    init_from = self.run.load_config().init_from
    if init_from is None or not pathlib.Path(init_from).is_dir():
      return None
    return find_model(pathlib.Path(init_from)).origin

  def load(self, like: Any = None) -> Pretrained:
    """The model, without the state of its optimizer; all hosts must ask.

    Args:
      like: ShapeDtypeStructs that say where parameters lie and in which dtype.
    """
    config = hosts.together(self.config)
    if like is None:
      like = parameter_shapes(config)
    # As it was saved, whatever this process computes in.
    with jax.enable_x64(True):
      stored = hosts.together(
        lambda: read_params(
          self.run.checkpoints, self.step, like, config.param_dtype
        )
      )
      saved = stored.checked().state
      params = jax.tree.map(lambda x, y: x.astype(y.dtype), saved, like)
    return Pretrained(config, params)

  def __str__(self) -> str:
    return f"run {self.run.root} after {self.step} updates"


StoredModel = ModelDirectory | RunCheckpoint


def find_model(path: pathlib.Path) -> StoredModel:
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
    steps = complete_steps(run.checkpoints)
    if not steps:
      raise ConfigError(f"{run.root} has no complete checkpoint.")
    step = steps[0]
  return RunCheckpoint(run, step)


def check_same_model(stored: StoredModel, config: ModelConfig) -> None:
  """Raises ConfigError unless a stored model is the one that a config means.

  Args:
    stored: the model.
    config: may compute it otherwise, in another dtype for example.
  """
  changed = [
    f"  model.{name}: {theirs!r} there, {ours!r} in the config"
    for name, (theirs, ours) in differences(stored.config(), config).items()
    if name not in NOT_THE_MODEL
  ]
  if not changed:
    return
  hint = ""
  if any("routing" in line for line in changed):
    hint = (
      "\nA standard model is given a routing by `python -m train.convert import"
      " DIR OUT --routing.variant ... --routing.gate scalar`."
    )
  raise ConfigError(
    f"init_from: {stored} holds another model:\n" + "\n".join(changed) + hint
  )
