"""Tasks in several processes, which end when their work is called off.

Processes are started afresh (`spawn`): the libraries in this one may have
threads. They end when this one does, however it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
import contextlib
import multiprocessing
import os
import signal
import threading
from typing import Any, Protocol, TypeVar

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

# Told how many documents and tokens were done; raises to stop the work.
Tick = Callable[[int, int], None]

_SECONDS = 0.5


class Task(Protocol[R_co]):
  """Something to do; can be pickled."""

  def run(self, tick: Tick) -> R_co:
    """Does it."""


class Workers:
  """Runs tasks; see `start_workers`."""

  def __init__(self, executor: futures.Executor | None, tick: "_Tick"):
    self._executor = executor
    self._tick = tick

  def run(
    self,
    tasks: Sequence[Task[R]],
    watch: Callable[[int, int, int], None] = lambda *_: None,
  ) -> list[R]:
    """Returns the result of each task, in order.

    Args:
      tasks: are begun in this order.
      watch: told, now and then, how many tasks, documents and tokens are done.

    Raises:
      ChildProcessError: a process was killed.
    """
    before = self._tick.sums()

    def tell(done: int) -> None:
      now = self._tick.sums()
      watch(done, now[0] - before[0], now[1] - before[1])

    if self._executor is None:
      results = []
      for task in tasks:
        results.append(task.run(self._tick))
        tell(len(results))
      return results
    running = [self._executor.submit(_run, task) for task in tasks]
    try:
      left = set(running)
      while left:
        done, left = futures.wait(
          running, _SECONDS, return_when=futures.FIRST_EXCEPTION
        )
        for future in done:
          future.result()
        tell(len(done))
      return [future.result() for future in running]
    except BrokenProcessPool:
      raise ChildProcessError(
        "a worker process was killed, maybe because memory is short; use fewer"
        " workers."
      ) from None
    finally:
      self._tick.stop()
      for future in running:
        future.cancel()
      futures.wait(running)
      self._tick.start()


class _Tick:
  """Sums that all processes add to; a flag that calls their work off."""

  def __init__(self, context: Any):
    self._sums = context.Array("q", 2)
    self._stopped = context.Event()

  def __call__(self, documents: int, tokens: int) -> None:
    if self._stopped.is_set():
      raise futures.CancelledError
    with self._sums.get_lock():
      self._sums[0] += documents
      self._sums[1] += tokens

  def sums(self) -> tuple[int, int]:
    """Documents and tokens that were done so far."""
    documents, tokens = self._sums
    return documents, tokens

  def stop(self) -> None:
    """Work ends at its next tick."""
    self._stopped.set()

  def start(self) -> None:
    """Work may be done again."""
    self._stopped.clear()


@contextlib.contextmanager
def start_workers(count: int, *, threads: int = 1) -> Iterator[Workers]:
  """Gives processes, which are started when they are needed.

  Args:
    count: how many at most; 0 works in this process.
    threads: that a tokenizer may use in each of them.
  """
  context = multiprocessing.get_context("spawn")
  tick = _Tick(context)
  if not count:
    yield Workers(None, tick)
    return
  with futures.ProcessPoolExecutor(
    count, context, initializer=_begin, initargs=(tick, threads)
  ) as executor:
    yield Workers(executor, tick)


def available_cores() -> int:
  """Cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


_tick: Tick | None = None  # Of a worker process.


def _begin(tick: Tick, threads: int) -> None:
  global _tick
  _tick = tick
  os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
  os.environ["RAYON_NUM_THREADS"] = str(threads)
  # Of a terminal, the first process hears too: it calls the work off.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _run(task: Task[R]) -> R:
  assert _tick is not None
  _tick(0, 0)  # Tasks that were queued already cannot be cancelled.
  return task.run(_tick)
