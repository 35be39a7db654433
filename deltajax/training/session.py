"""One process's share of a run: updates, metrics, validation, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax

from deltajax.config import to_dict
from deltajax.training import hosts
from deltajax.training.evaluator import Evaluator
from deltajax.training.flops import utilization
from deltajax.training.mesh import place_batch
from deltajax.training.metrics import MetricsWriter, Progress, Rates
from deltajax.training.run_data import parts, RunData
from deltajax.training.saving import Saver
from deltajax.training.step import Trainer, TrainState
from deltajax.training.stopping import (
  PreemptedError,
  StopRequest,
  UnhealthyError,
)
from deltajax.training.watchdog import Watchdog


@dataclasses.dataclass
class Session:
  """What a run goes on with, and what it takes to do so.

  Attributes:
    trainer: the functions of the run.
    data: what it reads.
    evaluator: of its states.
    saver: of its checkpoints.
    writer: of its metrics.
    progress: how fast it goes.
    watchdog: is told what is done.
    stop: whether to end.
    log: takes lines for the console.
  """

  trainer: Trainer
  data: RunData
  evaluator: Evaluator
  saver: Saver
  writer: MetricsWriter
  progress: Progress
  watchdog: Watchdog
  stop: StopRequest
  log: Callable[[str], None]

  def __post_init__(self) -> None:
    self._skipped_in_a_row = 0
    self.validation: dict[str, float] = {}  # Of the last state, if any.

  def run(
    self,
    state: TrainState,
    batches: Any,
    step: int,
    last_step: int,
    lines: Sequence[Mapping[str, float]],
  ) -> TrainState:
    """Runs updates until `last_step` are completed.

    Args:
      state: to begin with.
      batches: of all updates to come.
      step: completed updates.
      last_step: that are to be.
      lines: of the metrics so far; empty on hosts that write none.

    Raises:
      PreemptedError: if it is asked to end before that, once all is saved.
      UnhealthyError: if too many updates in a row had to be skipped.
      NotSavedError: if the last checkpoint cannot be written.
    """
    training = self.trainer.config.training
    update = self.trainer.jit_update()
    if step < last_step and self.stop.reached():
      raise self._preempted(step)
    if step:
      self._catch_up(state, step, last_step, lines)
    self.watchdog.begin("update", step + 1)
    pending = None
    while step < last_step:
      with self.progress.waiting():
        rows = next(batches)
      batch = place_batch(self.trainer.sharding, rows, training.batch_size)
      state, metrics = update(state, batch)
      step += 1
      # Metrics are read one update late, so that the device never waits.
      if pending is not None:
        self._report(*pending)
      pending = (step, metrics)
      is_last = step == last_step
      stops = self.stop.reached()
      due = self.saver.due(step)
      evaluates = self._evaluates(step, last_step, due)
      if evaluates or due or stops:
        self._report(*pending)
        pending = None
        loss = None
        # There may be little time: the next session does it.
        if evaluates and not stops:
          loss = self._evaluate(step, state)
        # While updates are skipped nobody knows whether the state is good: the
        # older checkpoints are.
        good = not self._skipped_in_a_row
        if is_last or stops or (due and good):
          waits = is_last or stops
          self._save(step, state, batches, loss, waits)
        if is_last and stops:  # Saved first, for there may be little time.
          self._evaluate(step, state)
        self.progress.skip(step)
        self.watchdog.begin("update", step + 1)
      if stops and not is_last:
        raise self._preempted(step)
    return state

  def validate(self, state: TrainState) -> dict[str, float]:
    """Metrics of the validation set; raises UnhealthyError if not finite."""
    values = self.evaluator.validate(state.params)
    loss = values["validation/loss"]
    if not math.isfinite(loss):
      raise UnhealthyError(
        f"validation loss is {loss}; {self.saver.last_good()}."
      )
    return values

  def test(
    self, state: TrainState, step: int, lines: Sequence[Mapping[str, float]]
  ) -> dict[str, float]:
    """Metrics of the test split, once all updates are done; written down once.

    Args:
      state: of the run.
      step: completed updates.
      lines: of the metrics so far; empty on hosts that write none.
    """
    if step < self.trainer.config.training.steps:
      return {}
    known = {
      name: value
      for line in lines
      for name, value in line.items()
      if line["step"] == step and name.startswith("test/")
    }
    if not hosts.any_host(hosts.is_main_host() and not known):
      return known
    values = self.evaluator.test(state.params)
    if values:
      self.writer.write(step, values)
    return values

  def _evaluates(self, step: int, last_step: int, due: bool) -> bool:
    """Whether there is a validation after an update.

    Args:
      step: completed updates.
      last_step: that are to be.
      due: whether a checkpoint is.
    """
    training = self.trainer.config.training
    # Of checkpoints of which the best are kept each has a loss of its own.
    if due and training.keep_best:
      return True
    return step % training.eval_every == 0 or step == last_step

  def _catch_up(
    self,
    state: TrainState,
    step: int,
    last_step: int,
    lines: Sequence[Mapping[str, float]],
  ) -> None:
    """Makes the validation that a session which had to end left undone."""
    training = self.trainer.config.training
    due = step % training.checkpoint_every == 0
    if not self._evaluates(step, last_step, due):
      return
    known = _losses_at(lines, step)
    if hosts.any_host(hosts.is_main_host() and not known):
      known = [self._evaluate(step, state)]
    if known:
      self.saver.note_loss(step, known[0])

  def _evaluate(self, step: int, state: TrainState) -> float:
    """Writes down how good a state is; returns the validation loss."""
    self.validation = self.validate(state)
    routing = self.evaluator.routing(state.params)
    self.writer.write(step, self.validation | routing)
    return self.validation["validation/loss"]

  def _report(self, step: int, metrics: dict[str, jax.Array]) -> None:
    config = self.trainer.config
    values = {name: float(x) for name, x in metrics.items()}
    self.watchdog.begin("update", step + 1)
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
    self.watchdog.begin("checkpoint", step)
    position = {
      "iterator": batches.get_state(),
      "fingerprint": self.data.train.info.fingerprint,
      "parts": parts(self.data),
    }
    save = self.saver.finish if waits else self.saver.save
    config = to_dict(self.trainer.config)
    save(step, state, position, config, validation_loss)
    self.writer.write(
      step, {"checkpoint/blocked_seconds": self.saver.blocked_seconds}
    )

  def _preempted(self, step: int) -> PreemptedError:
    steps = self.trainer.config.training.steps
    return PreemptedError(
      f"this process was asked to end (SIGTERM); {step} of {steps} updates are"
      " done and saved. The same command goes on from there."
    )


def _losses_at(lines: Sequence[Mapping[str, float]], step: int) -> list[float]:
  """The validation losses after an update that lines of metrics have."""
  name = "validation/loss"
  return [x[name] for x in lines if x["step"] == step and name in x]
