"""Says where a run hangs: in a step, a collective, the data or the disk."""

from collections.abc import Callable
import faulthandler
import os
import pathlib
import threading
import time

from deltajax.training.stopping import HUNG

# Added for the first of each kind of work, which compiles.
COMPILE_SECONDS = 1200.0


class Watchdog:
  """A thread that reports when nothing happens for too long.

  Use as a context manager. All threads' stacks are appended to a file, once
  for each hang.

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
    self._what, self._since = "start", time.monotonic()
    self._reported = False
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
    now = time.monotonic()
    if self._reported:
      waited = now - self._since
      self._log(f"watchdog  {self._what} ended after {waited:.0f} s")
    self._limit = self._seconds or 0.0
    if kind not in self._begun:
      self._limit += self._compile_seconds
    self._begun.add(kind)
    self._what = kind if number is None else f"{kind} {number}"
    self._since = now
    self._reported = False

  def _watch(self) -> None:
    assert self._seconds is not None
    while not self._end.wait(min(1.0, self._seconds / 4)):
      if self._reported or time.monotonic() - self._since < self._limit:
        continue
      self._reported = True
      self._log(
        f"WARNING   {self._what} takes more than {self._limit:g} s; the"
        f" stacks of all threads are in {self._write_stacks()}"
      )
      if self._exits:
        os._exit(HUNG)

  def _write_stacks(self) -> str:
    """Writes the stacks of all threads; returns where to."""
    try:
      with self._stacks.open("a") as file:
        file.write(f"\n{time.ctime()}: {self._what}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:  # The disk may be what hangs.
      faulthandler.dump_traceback(all_threads=True)
      return f"the error output ({error})"
    return str(self._stacks)
