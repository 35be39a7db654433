"""The loop of a run: from a config to a run that is done, or goes on."""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import pathlib

import numpy as np

from deltajax.checkpoints.manager import Checkpoints, Keep
from deltajax.checkpoints.reading import Unchecked
from deltajax.config import (
  from_dict,
  HostsConfig,
  RunConfig,
  to_dict,
)
from deltajax.data.pipeline import train_iterator
from deltajax.training import hosts
from deltajax.training.dtypes import check_dtypes
from deltajax.training.evaluator import Evaluator
from deltajax.training.load import (
  check_same_model,
  find_model,
  StoredModel,
)
from deltajax.training.metrics import (
  import_wandb,
  metrics_writer,
  Progress,
  read_metrics,
)
from deltajax.training.run_data import (
  check_same_data,
  digest_of_rows,
  load_data,
  RunData,
)
from deltajax.training.run_directory import check_same_run, RunDirectory
from deltajax.training.saving import restore_newest, Saver
from deltajax.training.session import Session
from deltajax.training.step import Trainer, TrainState
from deltajax.training.stopping import stop_requests
from deltajax.training.summary import (
  attention_choice,
  depth_choice,
  host_line,
  summary,
)
from deltajax.training.watchdog import Watchdog


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
    test: metrics of the test split, once all updates are done; empty where
      there is none. Like `before`, of the host that writes.
  """

  directory: RunDirectory
  data: RunData
  trainer: Trainer
  state: TrainState
  step: int
  validation: dict[str, float]
  before: dict[str, float] | None
  test: dict[str, float]


def train(
  config: RunConfig,
  workdir: pathlib.Path,
  log: Callable[[str], None] = print,
  on_start: Callable[[TrainState], None] | None = None,
  on_end: Callable[[RunResult], None] | None = None,
) -> RunResult:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: of the run.
    workdir: the run's directory; a new one, or its own.
    log: takes lines for the console.
    on_start: is given the state before the first update, by a run that does not
      go on from a checkpoint.
    on_end: is given the result, on all hosts, while the directory is still
      this run's alone and the watchdog watches.

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
    log = _warnings_to(log)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(stop_requests())
    directory = RunDirectory(workdir)
    trainer, rows, given = hosts.together(lambda: _prepare(config, directory))
    shared = dataclasses.replace(config, hosts=HostsConfig())
    hosts.agree(
      {
        "config": json.dumps(to_dict(shared)),
        "--workdir": str(workdir),
        "init_from": str(given),
      }
    )
    data = hosts.main_host_first(lambda: load_data(config))
    hosts.agree(
      {
        "training data": data.train.info.fingerprint,
        "validation data": digest_of_rows(data.validation),
      }
    )
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

    def take_directory() -> None:
      stack.enter_context(directory.locked())
      directory.check(config)  # Again: it may be another run's by now.
      directory.checkpoints.mkdir(exist_ok=True)

    hosts.on_main_host(take_directory)
    watchdog = stack.enter_context(_watchdog(config, directory))
    keep = Keep(
      training.keep_checkpoints, training.keep_every, training.keep_best
    )
    saved = hosts.together(
      lambda: stack.enter_context(Checkpoints(directory.checkpoints, keep))
    )
    hosts.agree({"checkpoints": str(saved.steps())})

    def read(step: int) -> Unchecked:
      saved_config = from_dict(RunConfig, saved.config(step))
      check_same_run(saved_config, config, f"checkpoint {step} of {workdir}")
      stored = saved.read(step, abstract_state)
      if "data.content" not in training.accept:
        check_same_data(stored.found.data, config.data, data)
      return stored

    restored = restore_newest(saved, read, log)
    step = 0
    if restored is not None:
      step, state = restored.step, restored.state
      batches.set_state(restored.data["iterator"])
      log(f"resumed after {step} of {training.steps} updates")
    else:
      state = _new_state(trainer, given, log)
    # Nothing is left that could refuse the run.
    hosts.on_main_host(lambda: directory.claim(config))
    if restored is None and on_start is not None:
      on_start(state)
    last_step = training.stop_after or training.steps
    if step >= last_step:
      log(f"nothing to do: {step} updates are done, and {last_step} are asked")
    writer = hosts.together(
      lambda: stack.enter_context(metrics_writer(directory, config, step, log))
    )
    session = Session(
      trainer=trainer,
      data=data,
      evaluator=Evaluator(trainer, data, watchdog, log),
      saver=Saver(saved, training.checkpoint_every, log),
      writer=writer,
      progress=Progress(step, last_step),
      watchdog=watchdog,
      stop=stop,
      log=log,
    )
    if given is not None and not step:
      writer.write(0, session.validate(state))

    def written() -> list[dict[str, float]]:
      return hosts.on_main_host(lambda: read_metrics(directory.metrics)) or []

    state = session.run(state, batches, step, last_step, written())
    step = max(step, last_step)
    validation = session.validation or session.validate(state)
    lines = written()
    result = RunResult(
      directory=directory,
      data=data,
      trainer=trainer,
      state=state,
      step=step,
      validation=validation,
      before=lines[0] if given and lines else None,
      test=session.test(state, step, lines),
    )
    watchdog.begin("report")
    if on_end is not None:
      on_end(result)
    watchdog.begin("end")
  return result


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
  check_dtypes(config.model)
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


def _new_state(
  trainer: Trainer, given: StoredModel | None, log: Callable[[str], None]
) -> TrainState:
  """Of a run that begins: with a model that it is given, or a random one."""
  if given is None:
    return trainer.compiled_init()
  log(f"start     {given}")
  like = trainer.abstract_state().params
  return trainer.compiled_start(given.load(like).params)


def _warnings_to(log: Callable[[str], None]) -> Callable[[str], None]:
  """Of a host that does not write, whose troubles may be its own."""

  def warn(line: str) -> None:
    if line.startswith("WARNING"):
      log(line)

  return warn
