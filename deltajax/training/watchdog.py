"""Says where a run hangs: in a step, a collective, the data or the disk."""

from collections.abc import Callable
import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import sys
import threading
import time

from deltajax.training.stopping import HUNG

# Added for the first of each kind of work, which compiles.
COMPILE_SECONDS = 1200.0
# For a report, which may hang too: the disk may be what does.
REPORT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
  """What is being done.

  Attributes:
    name: for messages.
    since: when it began.
    seconds: that it may take.
  """

  name: str
  since: float
  seconds: float

  def age(self) -> float:
    """Seconds since it began."""
    return time.monotonic() - self.since


class Watchdog:
  """A thread that reports when nothing happens for too long.

  Use as a context manager. All threads' stacks go to the error output and are
  appended to a file, once for each hang.

  Args:
    seconds: after which a hang is reported; None: never.
    stacks: the file.
    log: takes lines for the console; on every host, since any may hang.
    exits: whether the process then ends, with exit code 4, so that whoever
      started it can start it again.
    compile_seconds: that the first work of each kind may take longer.
  """

  def __init__(
    self,
    seconds: float | None,
    stacks: pathlib.Path,
    log: Callable[[str], None] = print,
    exits: bool = False,
    compile_seconds: float = COMPILE_SECONDS,
  ):
    self._seconds = seconds
    self._stacks = stacks
    self._log = log
    self._exits = exits
    self._compile_seconds = compile_seconds
    self._begun: set[str] = set()
    self._work: _Work | None = None
    self._reported: _Work | None = None
    self.begin("start")
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> "Watchdog":
    if self._seconds is not None:
      self._thread.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()
    if self._seconds is not None:
      self._thread.join()

  def begin(self, kind: str, number: int | None = None) -> None:
    """Something new begins; what came before did not hang.

    Args:
      kind: of work, to be named if it takes too long.
      number: which of its kind.
    """
    before = self._work
    seconds = self._seconds or 0.0
    if kind not in self._begun:
      seconds += self._compile_seconds
    self._begun.add(kind)
    name = kind if number is None else f"{kind} {number}"
    # All at once: the thread may look at any moment.
    self._work = _Work(name, time.monotonic(), seconds)
    if before is not None and before is self._reported:
      self._log(f"watchdog  {before.name} ended after {before.age():.0f} s")

  def _watch(self) -> None:
    assert self._seconds is not None
    while not self._end.wait(min(1.0, self._seconds / 4)):
      work = self._work
      if work is None or work is self._reported or work.age() < work.seconds:
        continue
      self._reported = work
      report = threading.Thread(target=self._report, args=[work], daemon=True)
      report.start()
      report.join(REPORT_SECONDS)
      goes_on = work is self._work and not self._end.is_set()
      if self._exits and goes_on:
        os._exit(HUNG)

  def _report(self, work: _Work) -> None:
    """Says what hangs; what is more likely to hang too comes later."""
    self._log(
      f"WARNING   {work.name} takes more than {work.seconds:g} s; the stacks of"
      f" all threads go to the error output and to {self._stacks}"
    )
    sys.stdout.flush()  # Nothing does that where the process is ended so.
    with contextlib.suppress(Exception):  # A notebook has none.
      faulthandler.dump_traceback(all_threads=True)
    try:
      with self._stacks.open("a") as file:
        file.write(f"\n{time.ctime()}: {work.name}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
      self._log(f"WARNING   the stacks are in no file: {error}")
