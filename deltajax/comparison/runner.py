"""Runs of a comparison, each in a process of its own, one after the other."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time
from typing import Any

from deltajax.comparison.plan import PlannedRun
from deltajax.comparison.record import read_outcome
from deltajax.config import ConfigError, to_dict
from deltajax.training.run_directory import RunDirectory
from deltajax.training.stopping import (
  INTERRUPTED,
  PREEMPTED,
  PreemptedError,
  USAGE_ERROR,
)

_TAIL_LINES = 12


@dataclasses.dataclass(frozen=True)
class Failure:
  """A run that died.

  Attributes:
    run: which.
    exit_code: of its process; -N for signal N.
    tail: the last lines that it printed.
  """

  run: PlannedRun
  exit_code: int
  tail: str

  def __str__(self) -> str:
    code = self.exit_code
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = self.tail.replace("\n", "\n    ")
    return f"{self.run} died with {how}:\n    {lines}"


def check_runs(runs: Sequence[PlannedRun]) -> None:
  """Raises ConfigError if the directory of a run is another run's."""
  for run in runs:
    RunDirectory(run.directory).check(run.config)


def is_finished(run: PlannedRun) -> bool:
  """Whether all updates of a run are done."""
  outcome = read_outcome(run.directory)
  return outcome is not None and outcome.step == run.config.training.steps


def find_failure(run: PlannedRun) -> Failure | None:
  """How a run died when it was last tried, if it did."""
  paths = _Paths(run)
  if is_finished(run) or not paths.exit_code.exists():
    return None
  return Failure(run, int(paths.exit_code.read_text()), paths.tail())


def spent_seconds(runs: Sequence[PlannedRun]) -> float:
  """How long all processes of runs took, compilation included.

  Those that died are counted; not one whose parent was killed with it.
  """
  files = [_Paths(run).seconds for run in runs]
  return sum(
    float(line)
    for file in files
    if file.exists()
    for line in file.read_text().split()
  )


def execute(
  runs: Sequence[PlannedRun],
  command: Sequence[str],
  log: Callable[[str], None] = print,
  check: Callable[[], None] = lambda: None,
) -> list[Failure]:
  """Trains what is not trained yet; returns the runs that died.

  Args:
    runs: in the order in which they are trained.
    command: starts a process that trains; it is given the directory of a run
      as one more argument, and the config as JSON on its input.
    log: takes lines for the console.
    check: is called first, and after each run that is done; ends all by
      raising.

  Raises:
    ConfigError: if a process finds that its run cannot be trained as it is.
    PreemptedError: after SIGTERM, once the process at hand has ended, with a
      checkpoint if it had begun.
    KeyboardInterrupt: after Ctrl-C.
  """
  failures = []
  check()
  for number, run in enumerate(runs, 1):
    if is_finished(run):
      continue
    log(f"run       {number} of {len(runs)}: {run}")
    exit_code, asked_to_end = _train(run, command)
    if asked_to_end or exit_code == PREEMPTED:
      raise PreemptedError(
        f"this process was asked to end (SIGTERM), during {run}. The same"
        " command goes on from there."
      )
    if exit_code == 0 and is_finished(run):
      log(f"          validation loss {_final_loss(run):.4f}")
      check()
      continue
    paths = _Paths(run)
    if exit_code in (INTERRUPTED, -signal.SIGINT):
      raise KeyboardInterrupt
    if exit_code == USAGE_ERROR:
      raise ConfigError(f"{run} cannot be trained:\n{paths.tail()}")
    paths.exit_code.write_text(f"{exit_code}\n")
    failures.append(Failure(run, exit_code, paths.tail()))
    log(f"WARNING   {failures[-1]}")
  return failures


@dataclasses.dataclass(frozen=True)
class _Paths:
  """Where a run's process leaves what it prints, and how it ended."""

  run: PlannedRun

  @property
  def log(self) -> pathlib.Path:
    return self._directory / f"seed-{self.run.seed}.log"

  @property
  def exit_code(self) -> pathlib.Path:
    return self._directory / f"seed-{self.run.seed}.exit"

  @property
  def seconds(self) -> pathlib.Path:
    """One line for each process."""
    return self._directory / f"seed-{self.run.seed}.seconds"

  def tail(self) -> str:
    if not self.log.exists():
      return "(it printed nothing)"
    text = self.log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])

  @property
  def _directory(self) -> pathlib.Path:
    out = self.run.directory.parents[2]
    return out / "logs" / self.run.arm


def _train(run: PlannedRun, command: Sequence[str]) -> tuple[int, bool]:
  """Trains one run.

  Returns:
    The exit code of its process, and whether this one was asked to end.
  """
  paths = _Paths(run)
  paths.log.parent.mkdir(parents=True, exist_ok=True)
  paths.exit_code.unlink(missing_ok=True)
  # Seeds of an arm compile the same programs.
  cache = run.directory.parents[2] / "compiled"
  environment = {"JAX_COMPILATION_CACHE_DIR": str(cache.absolute())}
  begin = time.monotonic()
  with paths.log.open("a") as file:
    process = subprocess.Popen(
      [*command, str(run.directory)],
      stdin=subprocess.PIPE,
      stdout=file,
      stderr=subprocess.STDOUT,
      env=environment | os.environ,
      text=True,
    )
    with _passing_on_termination(process) as asked_to_end:
      try:
        process.communicate(json.dumps(to_dict(run.config)))
      except KeyboardInterrupt:  # the process has it, too
        process.wait()
        raise
      finally:
        with paths.seconds.open("a") as seconds:
          seconds.write(f"{time.monotonic() - begin:.1f}\n")
  return process.returncode, bool(asked_to_end)


@contextlib.contextmanager
def _passing_on_termination(process: subprocess.Popen) -> Iterator[list[int]]:
  """SIGTERM goes to the process, and into the list that is given."""
  received: list[int] = []

  def pass_on(number: int, frame: Any) -> None:
    del frame
    received.append(number)
    process.terminate()

  before = signal.signal(signal.SIGTERM, pass_on)
  try:
    yield received
  finally:
    signal.signal(signal.SIGTERM, before)


def _final_loss(run: PlannedRun) -> float:
  outcome = read_outcome(run.directory)
  assert outcome is not None
  return outcome.validation["validation/loss"]
