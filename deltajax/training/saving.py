"""When checkpoints are written, and what happens where that fails.

A run goes on without the checkpoint that a full disk or a lost connection
refuses; it says so, keeps the older ones, and tries again.
"""

from collections.abc import Callable, Iterator
import contextlib
import time
from typing import Any

from deltajax.checkpoints.checksums import ChecksumError
from deltajax.checkpoints.manager import Checkpoints
from deltajax.checkpoints.reading import Restored, Unchecked
from deltajax.config import ConfigError
from deltajax.training import hosts
from deltajax.training.stopping import NotSavedError

Log = Callable[[str], None]

# A checkpoint that failed is tried again after a tenth of the usual interval.
RETRIES_PER_INTERVAL = 10
LAST_ATTEMPTS = 3
SECONDS_BETWEEN_ATTEMPTS = 5.0


class Saver:
  """Decides when to save, and survives what goes wrong.

  Attributes:
    blocked_seconds: for which the last attempt held up the run.

  Args:
    saved: the checkpoints.
    every: updates from one to the next.
    log: takes lines for the console.
  """

  def __init__(self, saved: Checkpoints, every: int, log: Log):
    self._saved = saved
    self._every = every
    self._retry_every = max(1, every // RETRIES_PER_INTERVAL)
    self._log = log
    self._failed = False
    self.blocked_seconds = 0.0

  def due(self, step: int) -> bool:
    """Whether to save now; all hosts must ask after the same updates.

    Args:
      step: completed updates.
    """
    if step % self._every == 0:
      return True
    if step % self._retry_every:
      return False
    if not self._failed:
      self._note(self._problem_of(self._saved.check))
    return self._failed

  def save(self, step: int, *args: Any, **kwargs: Any) -> None:
    """Starts to write a checkpoint; see `Checkpoints.save`."""
    with self._blocking():
      self._save(step, *args, **kwargs)

  def finish(self, step: int, *args: Any, **kwargs: Any) -> None:
    """Writes a checkpoint and waits until it is complete.

    Raises:
      NotSavedError: if that fails several times.
    """
    with self._blocking():
      for attempt in range(LAST_ATTEMPTS):
        if attempt:
          time.sleep(SECONDS_BETWEEN_ATTEMPTS)
        self._save(step, *args, **kwargs)
        if not self._failed:
          self._note(self._problem_of(self._saved.wait))
        if not self._failed:
          return
    raise NotSavedError(
      f"update {step} is done, but its checkpoint could not be written;"
      f" {self.last_good()}."
    )

  def _save(self, step: int, *args: Any, **kwargs: Any) -> None:
    if step in self._saved.steps():
      # A run that goes on from it ends before its next update; or an attempt
      # that failed for another reason had written it.
      self._failed = False
      return
    # An earlier one may have failed since: it must not cost this one too.
    if not self._failed:
      self._note(self._problem_of(self._saved.wait))
    problem = self._problem_of(self._saved.probe)
    if problem is None:
      problem = self._problem_of(
        lambda: self._saved.save(step, *args, **kwargs)
      )
    self._note(problem)

  @contextlib.contextmanager
  def _blocking(self) -> Iterator[None]:
    begin = time.monotonic()
    try:
      yield
    finally:
      self.blocked_seconds = time.monotonic() - begin

  def note_loss(self, step: int, validation_loss: float) -> None:
    """See `Checkpoints.note_loss`."""
    self._saved.note_loss(step, validation_loss)

  def last_good(self) -> str:
    """What a run would go on from."""
    self._problem_of(self._saved.wait)
    steps = self._saved.steps()
    if not steps:
      return "no checkpoint was written yet"
    return f"the last good checkpoint has {steps[0]} updates"

  def _problem_of(self, work: Callable[[], None]) -> Exception | None:
    """What goes wrong with `work`, here or on another host."""
    problem: Exception | None = None
    try:
      work()
    except Exception as error:
      problem = error
    if hosts.any_host(problem is not None) and problem is None:
      problem = OSError("another host could not write; see what it says")
    return problem

  def _note(self, problem: Exception | None) -> None:
    if problem is None:
      self._failed = False
      return
    self._failed = True
    self._saved.start_again()
    self._log(
      f"WARNING   a checkpoint could not be written ({_reason(problem)});"
      f" the run goes on, {self.last_good()}, and it is tried again within"
      f" {self._retry_every} updates"
    )


def restore_newest(
  saved: Checkpoints, read: Callable[[int], Unchecked], log: Log
) -> Restored | None:
  """Reads the newest checkpoint that can be read; all hosts must call it.

  Newer ones are damaged; they are moved away, so that their numbers are free.

  Args:
    saved: the checkpoints.
    read: reads this host's part of one, without waiting for other hosts; a
      ConfigError on any is no damage, and ends the search.
    log: takes lines for the console.

  Returns:
    None if there is no checkpoint.

  Raises:
    ConfigError: if there are some, and none can be read.
  """
  damaged: list[int] = []
  for step in saved.steps():
    refused: ConfigError | None = None
    problem: Exception | None = None
    try:
      stored = read(step)
    except ConfigError as error:
      refused = error
    except Exception as error:
      problem = error
    hosts.agree({}, refused)
    if hosts.any_host(problem is not None):
      problem = problem or OSError("on another host; see what it says")
    else:
      try:
        restored = stored.checked()
      except ChecksumError as error:  # On all hosts.
        problem = error
    if problem is not None:
      log(f"WARNING   checkpoint {step} is damaged ({_reason(problem)})")
      damaged.append(step)
      continue
    if damaged:
      # Only after another was read: what is wrong may be something else.
      _put_aside(saved, damaged, log)
    return restored
  if damaged:
    raise ConfigError(
      f"none of the checkpoints {damaged} can be read; the lines above say why."
      " Move them away to begin anew."
    )
  return None


def _put_aside(saved: Checkpoints, damaged: list[int], log: Log) -> None:
  place = hosts.on_main_host(lambda: saved.put_aside(damaged))
  log(f"put aside {place}: {damaged}")
  saved.reload()


def _reason(problem: Exception) -> str:
  """The first line of a message."""
  lines = str(problem).strip().splitlines()
  return f"{type(problem).__name__}: {lines[0][:300] if lines else 'no reason'}"
