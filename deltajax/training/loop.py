"""The loop of a run: updates, metrics, validation, checkpoints, resume."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from deltajax.checkpoints.manager import Checkpoints
from deltajax.config import (
  ConfigError,
  from_dict,
  HostsConfig,
  RunConfig,
  to_dict,
)
from deltajax.data.packing import PackedSequences, target_mask
from deltajax.data.pipeline import (
  load_split,
  train_iterator,
  validation_batches,
)
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.training import hosts
from deltajax.training.load import (
  check_same_model,
  find_model,
  StoredModel,
)
from deltajax.training.mesh import place_batch
from deltajax.training.metrics import metrics_writer, MetricsWriter, Progress
from deltajax.training.run_directory import check_same_run, RunDirectory
from deltajax.training.step import Batch, Trainer, TrainState
from deltajax.training.summary import (
  attention_choice,
  depth_choice,
  host_line,
  summary,
)


class NonFiniteError(RuntimeError):
  """The loss or the gradient became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class RunData:
  """Everything that a run reads.

  Attributes:
    tokenizer: of the text.
    train: rows to learn from.
    validation: the fixed validation batches.
  """

  tokenizer: Tokenizer
  train: PackedSequences
  validation: Sequence[Batch]


@dataclasses.dataclass(frozen=True)
class RunResult:
  """How a run ended.

  Attributes:
    directory: where everything lies.
    data: what it read.
    trainer: the functions of the run.
    state: after the last update.
    step: completed updates.
    validation: metrics of the last validation.
    before: metrics of a validation before the first update, which there is for
      a model that was given.
  """

  directory: RunDirectory
  data: RunData
  trainer: Trainer
  state: TrainState
  step: int
  validation: dict[str, float]
  before: dict[str, float] | None


def load_data(config: RunConfig) -> RunData:
  """Reads and checks a run's data.

  Raises:
    ConfigError: if the vocabulary is too small for the tokenizer, the corpus
      is empty, or sequences or batches are larger than the corpus.
  """
  data, training = config.data, config.training
  tokenizer = get_tokenizer(data.tokenizer)
  if config.model.vocab_size < tokenizer.vocab_size:
    raise ConfigError(
      f"model.vocab_size is {config.model.vocab_size}, but tokenizer"
      f" {data.tokenizer!r} has {tokenizer.vocab_size} ids; use at least that."
    )

  def load(split: str) -> PackedSequences:
    return load_split(
      data.dataset,
      split,
      data_dir=data.data_dir,
      tokenizer=tokenizer,
      sequence_length=data.sequence_length,
    )

  return RunData(
    tokenizer=tokenizer,
    train=load("train"),
    validation=validation_batches(
      load("validation"),
      batch_size=training.batch_size // training.accumulation,
      num_rows=training.eval_sequences,
    ),
  )


def train(
  config: RunConfig,
  workdir: pathlib.Path,
  log: Callable[[str], None] = print,
) -> RunResult:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: of the run.
    workdir: the run's directory; a new one, or its own.
    log: takes lines for the console.

  Raises:
    ConfigError: for options, data or a directory that do not fit, before
      anything is compiled or written.
    NonFiniteError: if the loss or gradient stops being finite.
  """
  hosts.start(config.hosts, log)
  log(host_line())
  if not hosts.is_main_host():
    log = _say_nothing
  directory = RunDirectory(workdir)
  facts = dict.fromkeys(("config", "--workdir", "init_from"), "")
  problem: Exception | None = None
  try:
    trainer, rows, given = _prepare(config, directory)
    shared = dataclasses.replace(config, hosts=HostsConfig())
    facts["config"] = json.dumps(to_dict(shared))
    facts["--workdir"] = str(workdir)
    facts["init_from"] = str(given)
  except (ConfigError, OSError) as error:
    problem = error
  hosts.agree(facts, problem)
  data = hosts.main_host_first(lambda: load_data(config))
  hosts.agree({"training data": data.train.info.fingerprint})
  training = config.training
  batches = train_iterator(
    data.train,
    batch_size=training.batch_size,
    seed=training.seed,
    rows=rows,
  )
  abstract_state = trainer.abstract_state()
  for line in summary(
    config, trainer.sharding, data.train, abstract_state.params
  ):
    log(line)
  try:
    if hosts.is_main_host():
      directory.claim(config)
  except OSError as error:
    problem = error
  hosts.agree({}, problem)

  with Checkpoints(directory.checkpoints, training.keep_checkpoints) as saved:
    step = saved.latest_step() or 0
    hosts.agree({"newest checkpoint": str(step)})
    if step:
      saved_config = from_dict(RunConfig, saved.config(step))
      check_same_run(saved_config, config, f"checkpoint {step} of {workdir}")
      restored = saved.restore(step, abstract_state)
      _check_data(restored.data, data.train)
      batches.set_state(restored.data["iterator"])
      state = restored.state
      log(f"resumed after {step} of {training.steps} updates")
    elif given is not None:
      log(f"start     {given}")
      state = trainer.compiled_start(given.load(abstract_state.params).params)
    else:
      state = trainer.compiled_init()
    last_step = training.stop_after or training.steps
    if step >= last_step:
      log(f"nothing to do: {step} updates are done, and {last_step} are asked")
    with metrics_writer(directory, step) as writer:
      session = _Session(
        trainer, data, saved, writer, Progress(step, last_step), log
      )
      if given is not None and not step:
        writer.write(0, session.validate(state))
      state = session.run(state, batches, step, last_step)
      validation = session.validation or session.validate(state)
  return RunResult(
    directory=directory,
    data=data,
    trainer=trainer,
    state=state,
    step=max(step, last_step),
    validation=validation,
    before=_first_validation(directory) if given else None,
  )


def _prepare(
  config: RunConfig, directory: RunDirectory
) -> tuple[Trainer, np.ndarray, StoredModel | None]:
  """Whatever can be wrong with a run but its data, before it starts.

  Returns:
    The trainer, which rows of a batch are this host's, and the model that the
    run starts with, if it is given one.
  """
  dtype = config.model.dtype
  if jax.dtypes.canonicalize_dtype(dtype) != jax.numpy.dtype(dtype):
    raise ConfigError(
      f"model.dtype is {dtype}, but JAX would compute in float32; set"
      " JAX_ENABLE_X64=1."
    )
  directory.check(config)
  trainer = Trainer(config)
  attention_choice(config, trainer.sharding)
  depth_choice(config, trainer.sharding)
  rows = hosts.rows_of_host(trainer.sharding, config.training.batch_size)
  given = None
  if config.init_from is not None:
    given = find_model(pathlib.Path(config.init_from))
    check_same_model(given, config.model)
  return trainer, rows, given


def _first_validation(directory: RunDirectory) -> dict[str, float] | None:
  """What one host wrote down before the first update."""
  if not hosts.is_main_host():
    return None
  with directory.metrics.open() as lines:
    return json.loads(next(lines))


class _Session:
  """One process's share of a run."""

  def __init__(
    self,
    trainer: Trainer,
    data: RunData,
    saved: Checkpoints,
    writer: MetricsWriter,
    progress: Progress,
    log: Callable[[str], None],
  ):
    self._trainer = trainer
    self._data = data
    self._saved = saved
    self._writer = writer
    self._progress = progress
    self._log = log
    self._update = trainer.jit_update()
    self._loss = jax.jit(trainer.loss)
    self._validation_rows = hosts.rows_of_host(
      trainer.sharding, len(data.validation[0]["tokens"])
    )
    self.validation: dict[str, float] = {}

  def run(
    self, state: TrainState, batches: Any, step: int, last_step: int
  ) -> TrainState:
    """Runs updates until `last_step` are completed."""
    training = self._trainer.config.training
    pending = None
    while step < last_step:
      batch = place_batch(
        self._trainer.sharding, next(batches), training.batch_size
      )
      state, metrics = self._update(state, batch)
      step += 1
      # Metrics are read one update late, so that the device never waits.
      if pending is not None:
        self._report(*pending)
      pending = (step, metrics)
      evaluates = step % training.eval_every == 0 or step == last_step
      saves = step % training.checkpoint_every == 0 or step == last_step
      if evaluates or saves:
        # Nothing that is not finite may reach a checkpoint.
        self._report(*pending)
        pending = None
        if evaluates:
          self.validation = self.validate(state)
          self._writer.write(step, self.validation)
        if saves:
          self._save(step, state, batches)
        self._progress.skip(step)
    return state

  def validate(self, state: TrainState) -> dict[str, float]:
    """Loss in nats per token and bits per byte on the fixed validation set."""
    bytes_per_token = np.asarray(self._data.tokenizer.bytes_per_token)
    sharding = self._trainer.sharding
    batch_size = len(self._data.validation[0]["tokens"])
    loss = tokens = num_bytes = 0.0
    for batch in self._data.validation:
      own = {name: x[self._validation_rows] for name, x in batch.items()}
      sums = self._loss(state.params, place_batch(sharding, own, batch_size))
      mask = target_mask(batch["segment_ids"])
      loss += float(sums.loss)
      tokens += float(sums.tokens)
      num_bytes += float((bytes_per_token[batch["tokens"][:, 1:]] * mask).sum())
    if not math.isfinite(loss):
      raise NonFiniteError(f"validation loss is {loss}; {self._last_good()}.")
    metrics = {
      "validation/loss": loss / tokens,
      "validation/perplexity": math.exp(min(loss / tokens, 700.0)),
      "validation/bits_per_byte": loss / math.log(2) / num_bytes,
    }
    self._log(
      f"validation  loss {metrics['validation/loss']:.4f}"
      f"  perplexity {metrics['validation/perplexity']:.2f}"
      f"  bits per byte {metrics['validation/bits_per_byte']:.4f}"
    )
    return metrics

  def _report(self, step: int, metrics: dict[str, jax.Array]) -> None:
    training = self._trainer.config.training
    values = {name: float(x) for name, x in metrics.items()}
    for name in ("train/loss", "train/grad_norm"):
      if not math.isfinite(values[name]):
        raise NonFiniteError(
          f"{name} is {values[name]} at update {step}; {self._last_good()}."
        )
    self._progress.count(values["train/tokens"])
    if step % training.log_every == 0:
      rate, left = self._progress.rates(step)
      self._writer.write(step, values | {"train/tokens_per_second": rate})
      self._log(self._progress.line(step, values["train/loss"], rate, left))

  def _last_good(self) -> str:
    last = self._saved.latest_step()
    if last is None:
      return "no checkpoint was written yet"
    return f"the last good checkpoint has {last} updates"

  def _save(self, step: int, state: TrainState, batches: Any) -> None:
    position = {
      "iterator": batches.get_state(),
      "fingerprint": self._data.train.info.fingerprint,
    }
    self._saved.save(step, state, position, to_dict(self._trainer.config))


def _say_nothing(line: str) -> None:
  del line


def _check_data(position: dict[str, Any], train: PackedSequences) -> None:
  if position["fingerprint"] != train.info.fingerprint:
    raise ConfigError(
      "the training data are not those that the run was started with:"
      f" fingerprint {position['fingerprint'][:12]} in the checkpoint,"
      f" {train.info.fingerprint[:12]} now. Was the data set built again, by"
      " another Python?"
    )
