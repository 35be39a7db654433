"""Which models a command runs, and on what: the same data for all of them."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from deltajax.config import (
  ConfigError,
  DataConfig,
  MeshConfig,
  ModelConfig,
  RunConfig,
)
from deltajax.data.tokenizer_file import FILE_NAME as TOKENIZER_FILE
from deltajax.data.tokenizers import (
  check_vocabulary,
  get_tokenizer,
  Tokenizer,
)
from deltajax.models.transformer import TransformerLM
from deltajax.routing.sharding import Sharding
from deltajax.training.dtypes import check_dtype
from deltajax.training.load import find_model, RunCheckpoint, StoredModel
from deltajax.training.mesh import (
  check_fit,
  make_mesh,
  placed_shapes,
  RULES,
  Size,
)

_BATCH_SIZE = 8  # Of models that no run says one for.


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model that is to be run; its parameters are not loaded yet.

  Attributes:
    name: for tables and figures; unlike those of the others.
    stored: where it is.
    config: of the model, as it is stored.
    run: the config of the run that it comes from, if it comes from one.
  """

  name: str
  stored: StoredModel
  config: ModelConfig
  run: RunConfig | None

  def own_tokenizer(self) -> Tokenizer | None:
    """The tokenizer that it was trained with; None if that is not here."""
    name = self.stored.tokenizer
    if "/" in name:
      path = pathlib.Path(name)
      file = path / TOKENIZER_FILE if path.is_dir() else path
      # A model directory need not hold one.
      if not file.is_file():
        return None
    return get_tokenizer(name)


def find_subjects(paths: Sequence[pathlib.Path]) -> list[Subject]:
  """Finds the models of runs, checkpoints and model directories.

  Raises:
    ConfigError: for a path that is none of these, or is given twice.
  """
  found = [find_model(path) for path in paths]
  names = [
    _name(stored, path) for stored, path in zip(found, paths, strict=True)
  ]
  subjects: list[Subject] = []
  for stored, path, name in zip(found, paths, names, strict=True):
    if names.count(name) > 1:
      name = str(path)
    if name in [subject.name for subject in subjects]:
      raise ConfigError(f"{path} is given twice; give every model once.")
    run = None
    if isinstance(stored, RunCheckpoint):
      run = stored.run.load_config()
    subjects.append(Subject(name, stored, stored.config(), run))
  return subjects


def _name(stored: StoredModel, path: pathlib.Path) -> str:
  if not isinstance(stored, RunCheckpoint):
    return path.absolute().name
  run = stored.run.root.absolute().name
  is_run = path.absolute() == stored.run.root.absolute()
  return run if is_run else f"{run} at {stored.step}"


def common_data(
  subjects: Sequence[Subject], given: Mapping[str, Any]
) -> DataConfig:
  """What all models can be run on: what their runs read, unless told.

  Args:
    subjects: the models.
    given: fields of DataConfig that do not come from the runs; None for one
      that does.

  Raises:
    ConfigError: if runs differ and nothing is given, nothing names a data set,
      or the tokenizer is another than a model was trained with or has more ids
      than a model has.
  """
  values = {name: value for name, value in given.items() if value is not None}
  if "dataset" in values:
    values |= {"mixture": (), "weights": ()}
  for name in ("dataset", "mixture", "weights", "sequence_length", "data_dir"):
    named = {
      subject.name: getattr(subject.run.data, name)
      for subject in subjects
      if subject.run is not None
    }
    if name in values or not named:
      continue
    if len(set(named.values())) > 1 and name != "data_dir":
      said = ", ".join(f"{x!r} in {run}" for run, x in named.items())
      option = "context" if name == "sequence_length" else "data"
      raise ConfigError(
        f"the runs differ in data.{name}: {said}. Give --{option} to run"
        " all on the same data."
      )
    values[name] = next(iter(named.values()))
  if "dataset" not in values:
    raise ConfigError(
      "a model directory names no data set; give --data, the directory of a"
      " TFDS data set or one of deltajax's own."
    )
  if "tokenizer" not in values:
    values["tokenizer"] = subjects[0].stored.tokenizer
  _fill_in_length(subjects, values)
  tokenizer = get_tokenizer(values["tokenizer"])
  for subject in subjects:
    _check_tokenizer(subject, tokenizer, values["tokenizer"])
  return DataConfig(**values)


def _fill_in_length(
  subjects: Iterable[Subject], values: dict[str, Any]
) -> None:
  """Sets a sequence length where no run has one."""
  known = [x for s in subjects if (x := s.stored.context) is not None]
  default = min([DataConfig().sequence_length, *known])
  values.setdefault("sequence_length", default)


def _check_tokenizer(subject: Subject, tokenizer: Tokenizer, name: str) -> None:
  own = subject.own_tokenizer()
  if own is not None and own.fingerprint != tokenizer.fingerprint:
    raise ConfigError(
      f"{subject.name} was trained with tokenizer {subject.stored.tokenizer!r};"
      f" the data set is read with another, {name!r}. Every model must be"
      " given tokens of its own tokenizer."
    )
  vocabulary = f"the vocabulary of {subject.name}"
  check_vocabulary(tokenizer, subject.config.vocab_size, vocabulary)


@dataclasses.dataclass(frozen=True)
class MeshSizes:
  """Sizes of mesh axes, in place of those of a model's run.

  Attributes:
    data: copies of the model; -1 for what is left.
    fsdp: shards of parameters.
    tensor: shards of heads, mlp and vocabulary.
    context: shards of the sequence.
  """

  data: int | None = None
  fsdp: int | None = None
  tensor: int | None = None
  context: int | None = None


def default_batch_size(subjects: Sequence[Subject]) -> int:
  """Rows that the first run has on its devices at once."""
  for subject in subjects:
    if subject.run is not None:
      training = subject.run.training
      return training.batch_size // training.accumulation
  return _BATCH_SIZE


@dataclasses.dataclass(frozen=True)
class PlacedModel:
  """A model that is run and not trained: how, on what, and where.

  Attributes:
    config: of the model, with the dtype that it is computed in.
    data: what it is run on.
    sharding: the mesh that it lies on, with its rules.
  """

  config: ModelConfig
  data: DataConfig
  sharding: Sharding

  def abstract_params(self) -> Any:
    """Shapes, dtypes and shardings of its parameters; nothing is computed."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    boxed = jax.eval_shape(
      TransformerLM(self.config).init, jax.random.key(0), tokens
    )["params"]
    return placed_shapes(self.sharding, boxed, nn.meta.unbox(boxed))


def place_model(
  subject: Subject,
  data: DataConfig,
  batch_size: int,
  mesh_sizes: MeshSizes,
  dtype: str | None,
) -> PlacedModel:
  """Says how a model lies on the mesh of its run.

  Args:
    subject: the model.
    data: what it is run on.
    batch_size: rows of a batch.
    mesh_sizes: of mesh axes, in place of the run's where they are not None.
    dtype: of activations; None for the model's own.

  Raises:
    ConfigError: if there are not the devices for the mesh, the model or the
      batch does not fit it, or JAX would not compute in the dtype.
  """
  config = subject.run.mesh if subject.run else MeshConfig()
  sizes = dataclasses.asdict(mesh_sizes)
  given = {name: x for name, x in sizes.items() if x is not None}
  model = subject.config
  try:
    if dtype is not None:
      model = dataclasses.replace(model, dtype=dtype)
    check_dtype(model.dtype)
    mesh = make_mesh(dataclasses.replace(config, **given))
    check_fit(
      model,
      mesh,
      rows=Size("the batch size", batch_size),
      length=Size("the context", data.sequence_length),
    )
  except ConfigError as error:
    raise ConfigError(f"{subject.name}: {error}") from None
  return PlacedModel(model, data, Sharding(mesh, RULES))
