"""The loop of a run: updates, metrics, validation, checkpoints, resume."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from deltajax.analysis.analyze import conclude
from deltajax.analysis.observe import Observer
from deltajax.analysis.reads import model_reads
from deltajax.checkpoints.manager import Checkpoints, Keep, Restored
from deltajax.config import (
  ConfigError,
  from_dict,
  HostsConfig,
  RunConfig,
  to_dict,
)
from deltajax.data.packing import target_mask
from deltajax.data.pipeline import (
  load_mixture,
  Mixture,
  train_iterator,
  validation_batches,
)
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from deltajax.training import hosts
from deltajax.training.flops import utilization
from deltajax.training.load import (
  check_same_model,
  find_model,
  StoredModel,
)
from deltajax.training.mesh import place_batch
from deltajax.training.metrics import (
  import_wandb,
  metrics_writer,
  MetricsWriter,
  Progress,
  Rates,
)
from deltajax.training.run_directory import check_same_run, RunDirectory
from deltajax.training.saving import restore_newest, Saver
from deltajax.training.step import Batch, Trainer, TrainState
from deltajax.training.stopping import (
  PreemptedError,
  stop_requests,
  StopRequest,
  UnhealthyError,
)
from deltajax.training.summary import (
  attention_choice,
  depth_choice,
  host_line,
  summary,
)
from deltajax.training.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class RunData:
  """Everything that a run reads.

  Attributes:
    tokenizer: of the text.
    train: rows to learn from.
    validation: the fixed validation batches.
  """

  tokenizer: Tokenizer
  train: Mixture
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

  return RunData(
    tokenizer=tokenizer,
    train=load_mixture(data, "train"),
    validation=validation_batches(
      load_mixture(data, "validation"),
      batch_size=training.batch_size // training.accumulation,
      num_rows=training.eval_sequences,
    ),
  )


def train(
  config: RunConfig,
  workdir: pathlib.Path,
  log: Callable[[str], None] = print,
  on_start: Callable[[TrainState], None] | None = None,
) -> RunResult:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: of the run.
    workdir: the run's directory; a new one, or its own.
    log: takes lines for the console.
    on_start: is given the state before the first update, by a run that does not
      go on from a checkpoint.

  Raises:
    ConfigError: for options, data or a directory that do not fit, before
      anything is compiled or written.
    UnhealthyError: if too many updates in a row had to be skipped.
    PreemptedError: after SIGTERM, once the run is saved.
    NotSavedError: if the last checkpoint cannot be written.
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

  with contextlib.ExitStack() as stack:
    stack.enter_context(_locked(directory))
    keep = Keep(
      training.keep_checkpoints, training.keep_every, training.keep_best
    )
    saved = stack.enter_context(Checkpoints(directory.checkpoints, keep))
    hosts.agree({"checkpoints": str(saved.steps())})

    def read(step: int) -> Restored:
      saved_config = from_dict(RunConfig, saved.config(step))
      check_same_run(saved_config, config, f"checkpoint {step} of {workdir}")
      return saved.restore(step, abstract_state)

    restored = restore_newest(saved, read, log)
    step = 0
    if restored is not None:
      step, state = restored.step, restored.state
      if "data.content" not in training.accept:
        _check_data(restored.data, data.train)
      batches.set_state(restored.data["iterator"])
      log(f"resumed after {step} of {training.steps} updates")
    elif given is not None:
      log(f"start     {given}")
      state = trainer.compiled_start(given.load(abstract_state.params).params)
    else:
      state = trainer.compiled_init()
    if restored is None and on_start is not None:
      on_start(state)
    last_step = training.stop_after or training.steps
    if step >= last_step:
      log(f"nothing to do: {step} updates are done, and {last_step} are asked")
    session = _Session(
      trainer=trainer,
      data=data,
      saver=Saver(saved, training.checkpoint_every, log),
      writer=stack.enter_context(metrics_writer(directory, config, step, log)),
      progress=Progress(step, last_step),
      watchdog=stack.enter_context(_watchdog(config, directory)),
      stop=stack.enter_context(stop_requests()),
      log=log,
    )
    if given is not None and not step:
      session.writer.write(0, session.validate(state))
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


def _locked(directory: RunDirectory) -> contextlib.AbstractContextManager:
  """Keeps other processes out of a run's directory, on the host that writes."""
  lock = contextlib.ExitStack()
  problem: Exception | None = None
  try:
    if hosts.is_main_host():
      lock.enter_context(directory.locked())
  except (ConfigError, OSError) as error:
    problem = error
  hosts.agree({}, problem)
  return lock


def _watchdog(config: RunConfig, directory: RunDirectory) -> Watchdog:
  """Reports on every host: each may be the one that hangs."""
  health = config.health
  return Watchdog(
    health.hang_seconds, directory.stacks, exits=health.hang_exits
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
  if config.training.wandb_project is not None:
    import_wandb()
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


@dataclasses.dataclass
class _Session:
  """One process's share of a run."""

  trainer: Trainer
  data: RunData
  saver: Saver
  writer: MetricsWriter
  progress: Progress
  watchdog: Watchdog
  stop: StopRequest
  log: Callable[[str], None]

  def __post_init__(self) -> None:
    self._update = self.trainer.jit_update()
    self._loss = jax.jit(self.trainer.loss)
    self._validation_rows = hosts.rows_of_host(
      self.trainer.sharding, len(self.data.validation[0]["tokens"])
    )
    self.validation: dict[str, float] = {}
    self._skipped_in_a_row = 0
    config = self.trainer.config
    self._observer = None
    if config.training.eval_routing and model_reads(config.model):
      self._observer = Observer(
        config.model,
        config.data.sequence_length,
        self.trainer.sharding,
        gradients=False,
      )

  def run(
    self, state: TrainState, batches: Any, step: int, last_step: int
  ) -> TrainState:
    """Runs updates until `last_step` are completed.

    Raises:
      PreemptedError: if it is asked to end before that, once all is saved.
    """
    training = self.trainer.config.training
    pending = None
    while step < last_step:
      with self.progress.waiting():
        rows = next(batches)
      batch = place_batch(self.trainer.sharding, rows, training.batch_size)
      state, metrics = self._update(state, batch)
      step += 1
      # Metrics are read one update late, so that the device never waits.
      if pending is not None:
        self._report(*pending)
      pending = (step, metrics)
      is_last = step == last_step
      stops = self.stop.reached(step)
      evaluates = step % training.eval_every == 0 or is_last
      saves = self.saver.due(step) or is_last or stops
      if evaluates or saves:
        self._report(*pending)
        pending = None
        if evaluates and not stops:
          self.validation = self.validate(state)
          self.writer.write(step, self.validation | self.routing(state))
        # While updates are skipped nobody knows whether the state is good: the
        # older checkpoints are.
        if saves and (is_last or stops or not self._skipped_in_a_row):
          evaluated = self.validation if evaluates and not stops else {}
          self._save(
            *(step, state, batches, evaluated.get("validation/loss")),
            waits=is_last or stops,
          )
        self.progress.skip(step)
      if stops and not is_last:
        raise PreemptedError(
          f"this process was asked to end (SIGTERM); {step} of"
          f" {training.steps} updates are done and saved. The same command"
          " goes on from there."
        )
    return state

  def validate(self, state: TrainState) -> dict[str, float]:
    """Loss in nats per token and bits per byte on the fixed validation set."""
    self.watchdog.begin("validation")
    bytes_per_token = np.asarray(self.data.tokenizer.bytes_per_token)
    sharding = self.trainer.sharding
    batch_size = len(self.data.validation[0]["tokens"])
    loss = tokens = num_bytes = 0.0
    for batch in self.data.validation:
      own = {name: x[self._validation_rows] for name, x in batch.items()}
      sums = self._loss(state.params, place_batch(sharding, own, batch_size))
      mask = target_mask(batch["segment_ids"])
      loss += float(sums.loss)
      tokens += float(sums.tokens)
      num_bytes += float((bytes_per_token[batch["tokens"][:, 1:]] * mask).sum())
    if not math.isfinite(loss):
      raise UnhealthyError(
        f"validation loss is {loss}; {self.saver.last_good()}."
      )
    metrics = {
      "validation/loss": loss / tokens,
      "validation/perplexity": math.exp(min(loss / tokens, 700.0)),
      "validation/bits_per_byte": loss / math.log(2) / num_bytes,
    }
    self.log(
      f"validation  loss {metrics['validation/loss']:.4f}"
      f"  perplexity {metrics['validation/perplexity']:.2f}"
      f"  bits per byte {metrics['validation/bits_per_byte']:.4f}"
    )
    return metrics

  def routing(self, state: TrainState) -> dict[str, float]:
    """How sharply the model routes, beside a uniform read; see `Totals`."""
    if self._observer is None:
      return {}
    rows = self.trainer.sharding.num_shards("batch")
    batch = {name: x[:rows] for name, x in self.data.validation[0].items()}
    observed = self._observer.total(state.params, [batch])
    totals = conclude(self._observer, observed).totals
    if totals is None:
      return {}
    values = dataclasses.asdict(totals)
    return {f"routing/{k}": x for k, x in values.items() if x is not None}

  def _report(self, step: int, metrics: dict[str, jax.Array]) -> None:
    config = self.trainer.config
    values = {name: float(x) for name, x in metrics.items()}
    self.watchdog.begin(f"update {step + 1}")
    self.progress.count(values["train/tokens"])
    self._skipped_in_a_row = int(values["train/skipped_in_a_row"])
    if self._skipped_in_a_row:
      self._report_skipped(step, values)
    if step % config.training.log_every == 0:
      rates = self.progress.rates(step)
      values |= {
        "train/tokens_per_second": rates.tokens,
        "train/data_wait": rates.data_wait,
      }
      self.writer.write(step, values | self._use_of_devices(rates))
      self.log(self.progress.line(step, values["train/loss"], rates))

  def _report_skipped(self, step: int, values: Mapping[str, float]) -> None:
    """Raises UnhealthyError if it was one too many."""
    limit = self.trainer.config.health.skip_limit
    in_a_row = self._skipped_in_a_row
    what = (
      f"loss {values['train/loss']:.4g}, gradient norm"
      f" {values['train/grad_norm']:.4g}"
    )
    if in_a_row > limit:
      self.writer.write(step, values)
      raise UnhealthyError(
        f"update {step} had {what}, and {in_a_row} updates in a row had to be"
        f" skipped (health.skip_limit is {limit}); {self.saver.last_good()}."
      )
    self.log(
      f"WARNING   update {step} is skipped: {what} ({in_a_row} in a row,"
      f" {int(values['train/skipped'])} in all)"
    )

  def _use_of_devices(self, rates: Rates) -> dict[str, float]:
    """MFU and memory, as far as they can be known."""
    devices = self.trainer.sharding.mesh.devices
    mfu = utilization(
      self.trainer.config,
      rates.updates,
      devices.size,
      devices.flat[0].device_kind,
    )
    memory = jax.local_devices()[0].memory_stats() or {}
    found = {
      "train/mfu": mfu,
      "train/peak_bytes": memory.get("peak_bytes_in_use"),
    }
    return {name: x for name, x in found.items() if x is not None}

  def _save(
    self,
    step: int,
    state: TrainState,
    batches: Any,
    validation_loss: float | None,
    waits: bool,
  ) -> None:
    self.watchdog.begin(f"checkpoint {step}")
    position = {
      "iterator": batches.get_state(),
      "fingerprint": self.data.train.info.fingerprint,
    }
    save = self.saver.finish if waits else self.saver.save
    config = to_dict(self.trainer.config)
    save(step, state, position, config, validation_loss)
    self.writer.write(
      step, {"checkpoint/blocked_seconds": self.saver.blocked_seconds}
    )


def _say_nothing(line: str) -> None:
  del line


def _check_data(position: dict[str, Any], train: Mixture) -> None:
  if position["fingerprint"] != train.info.fingerprint:
    raise ConfigError(
      "the training data are not those that the run was started with:"
      f" fingerprint {position['fingerprint'][:12]} in the checkpoint,"
      f" {train.info.fingerprint[:12]} now. Was the data set built again, by"
      " another Python? To go on with the new data: --training.accept"
      " data.content."
    )
