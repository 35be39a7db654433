"""What a run of a comparison writes down beside its metrics, and reads back.

`start.json` says what a run began with, `outcome.json` how it ended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
from typing import Any, TypeVar

from flax import traverse_util
import numpy as np

from deltajax.checkpoints.names import count_parameters
from deltajax.config import ConfigError, from_dict, RunConfig
from deltajax.data.packing import target_mask
from deltajax.data.pipeline import train_iterator
from deltajax.evaluation.fingerprints import code_fingerprint
from deltajax.files import write_file
from deltajax.models.transformer import is_routing
from deltajax.training import metrics
from deltajax.training.ahead import abstract_batch, memory_use
from deltajax.training.loop import RunResult, train
from deltajax.training.run_data import load_data, RunData
from deltajax.training.run_directory import RunDirectory
from deltajax.training.step import Trainer, TrainState

START = "start.json"
OUTCOME = "outcome.json"
_BATCHES_COMPARED = 4
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DataIdentity:
  """What a run reads; equal for all arms of a seed.

  Attributes:
    train: fingerprint of all training rows.
    order: digest of the first batches.
    validation: digest of the validation batches.
    validation_tokens: how many of their tokens are predicted.
  """

  train: str
  order: str
  validation: str
  validation_tokens: int


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run begins with.

  Attributes:
    data: what it reads.
    shared: path -> `shape sha256` of each initial parameter that does not
      route over depth.
    parameters: how many numbers all parameters have.
    routing_parameters: how many of them route over depth.
    environment: versions, the commit, and devices.
  """

  data: DataIdentity
  shared: dict[str, str]
  parameters: int
  routing_parameters: int
  environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    step: completed updates.
    validation: metrics of the validation after the last one.
    skipped: updates that were not made.
    peak_step_bytes: most memory that an update holds at once on a device, as
      its compiler says.
  """

  step: int
  validation: dict[str, float]
  skipped: int
  peak_step_bytes: int


def train_recorded(
  config: RunConfig,
  workdir: pathlib.Path,
  log: Callable[[str], None] = print,
) -> None:
  """Trains, or resumes, and writes down how the run began and ended.

  Args:
    config: of the run.
    workdir: the run's directory.
    log: takes lines for the console.

  Raises:
    ConfigError, RunStopped: as `train` does.
  """

  def on_start(state: TrainState) -> None:
    data = describe_data(config, load_data(config))
    write(workdir / START, describe_start(data, state.params))

  result = train(config, workdir, log, on_start)
  write(workdir / OUTCOME, describe_outcome(result))


def describe_data(config: RunConfig, data: RunData) -> DataIdentity:
  """What a run reads.

  Args:
    config: of the run.
    data: that `load_data` gave for it.
  """
  batches = train_iterator(
    data.train,
    batch_size=config.training.batch_size,
    seed=config.training.seed,
    num_threads=0,
  )
  first = itertools.islice(batches, _BATCHES_COMPARED)
  masks = [target_mask(batch["segment_ids"]) for batch in data.validation]
  return DataIdentity(
    train=data.train.info.fingerprint,
    order=_digest_of_batches(first),
    validation=_digest_of_batches(data.validation),
    validation_tokens=int(sum(mask.sum() for mask in masks)),
  )


def describe_start(data: DataIdentity, params: Any) -> Start:
  """What a run begins with.

  Args:
    data: what it reads.
    params: its initial parameters, unboxed.
  """
  flat = traverse_util.flatten_dict(params)
  shared = {path: x for path, x in flat.items() if not is_routing(path)}
  count = count_parameters(params)
  return Start(
    data=data,
    shared={"/".join(path): _digest_of(x) for path, x in shared.items()},
    parameters=count.total,
    routing_parameters=count.routing,
    environment={
      **{k: str(x) for k, x in code_fingerprint().items() if x is not None},
      "machine": platform.machine(),
      "cpus": str(os.cpu_count()),
    },
  )


def describe_outcome(result: RunResult) -> Outcome:
  """How a run ended that did all of its updates."""
  return Outcome(
    step=result.step,
    validation=result.validation,
    skipped=int(result.state.health.skipped),
    peak_step_bytes=_peak_step_bytes(result.trainer),
  )


def write(path: pathlib.Path, values: Any) -> None:
  """Writes a dataclass as JSON, at once or not at all."""
  text = json.dumps(dataclasses.asdict(values), indent=1, allow_nan=False)
  write_file(path, text + "\n")


def read_start(run: pathlib.Path) -> Start:
  """What a run directory says of its start; raises ConfigError if nothing."""
  return _read(Start, run / START)


def read_outcome(run: pathlib.Path) -> Outcome | None:
  """How a run ended; None if it has not."""
  if not (run / OUTCOME).exists():
    return None
  return _read(Outcome, run / OUTCOME)


def read_metrics(run: pathlib.Path) -> Sequence[Mapping[str, float]]:
  """The lines of metrics.jsonl."""
  path = RunDirectory(run).metrics
  try:
    return metrics.read_metrics(path)
  except OSError as error:
    raise ConfigError(f"{path} cannot be read: {error}.") from None


def _read(cls: type[T], path: pathlib.Path) -> T:
  try:
    return from_dict(cls, json.loads(path.read_text()))
  # A TypeError is a field that is missing.
  except (OSError, ValueError, TypeError) as error:
    raise ConfigError(
      f"{path} cannot be read: {error}. Is it a run of train.compare?"
    ) from None


def _digest_of(x: Any) -> str:
  """Shape, dtype and sha256 of an array."""
  array = np.ascontiguousarray(x)
  digest = hashlib.sha256(array.tobytes()).hexdigest()
  return f"{list(array.shape)} {array.dtype} {digest}"


def _digest_of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
  digest = hashlib.sha256()
  for batch in batches:
    for name in sorted(batch):
      digest.update(name.encode() + _digest_of(batch[name]).encode())
  return digest.hexdigest()


def _peak_step_bytes(trainer: Trainer) -> int:
  lowered = trainer.jit_update().lower(
    trainer.abstract_state(), abstract_batch(trainer)
  )
  return memory_use(lowered.compile(), trainer.sharding.platform).peak
