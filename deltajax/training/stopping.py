"""Why a run ends before its last update, and what the process then returns.

Exit codes of all commands are here and in docs/running.md.
"""

from collections.abc import Iterator
import contextlib
import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

RUN_ERROR = 1
USAGE_ERROR = 2
UNHEALTHY = 3
HUNG = 4
# EX_TEMPFAIL of sysexits.h: start the same command again.
PREEMPTED = 75
INTERRUPTED = 130


class RunStopped(RuntimeError):
  """A run ended early; the message says where it stands.

  Attributes:
    exit_code: of the process.
  """

  exit_code = RUN_ERROR


class UnhealthyError(RunStopped):
  """Updates had to be skipped, more in a row than is allowed."""

  exit_code = UNHEALTHY


class PreemptedError(RunStopped):
  """The machine is wanted back; the run was saved."""

  exit_code = PREEMPTED


class NotSavedError(RunStopped):
  """The last checkpoint of a session could not be written.

  Of a run that is done, or that was asked to end.
  """


class StopRequest:
  """Whether someone has asked the process to end (SIGTERM)."""

  def __init__(self) -> None:
    """Nobody has."""
    self._asked = False
    self._calls = 0

  def ask(self, signal_number: int, frame: FrameType | None) -> None:
    """Takes the signal."""
    del signal_number, frame
    self._asked = True

  def reached(self) -> bool:
    """Whether to end now, on all hosts at the same call.

    All hosts must ask equally often.
    """
    self._calls += 1
    if jax.process_count() == 1:
      return self._asked
    # It names a later call, whenever it is asked; so they are counted from 1.
    return multihost_utils.reached_preemption_sync_point(self._calls)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
  """Catches SIGTERM while the block runs; hosts must have joined.

  On several hosts JAX catches it, on any of them, and finds an update that all
  can still reach.
  """
  request = StopRequest()
  alone = jax.process_count() == 1
  if not alone or threading.current_thread() is not threading.main_thread():
    yield request
    return
  before = signal.signal(signal.SIGTERM, request.ask)
  try:
    yield request
  finally:
    signal.signal(signal.SIGTERM, before)
