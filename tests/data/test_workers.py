"""Tasks in processes: results in order, and nobody left behind."""

from concurrent import futures
import dataclasses
import os
import signal
import time

import pytest

from deltajax.data.workers import start_workers


@dataclasses.dataclass(frozen=True)
class Square:
  number: int

  def run(self, tick):
    tick(1, self.number)
    return self.number**2


@dataclasses.dataclass(frozen=True)
class Endless:
  """Says that it began; ends when it is called off."""

  file: str

  def run(self, tick):
    while True:
      tick(0, 0)
      with open(self.file, "w") as file:
        file.write(str(os.getpid()))
      time.sleep(0.05)


@dataclasses.dataclass(frozen=True)
class FailAfter:
  """Fails once others have begun."""

  file: str
  how: str

  def run(self, tick):
    while not os.path.exists(self.file):
      time.sleep(0.05)
    if self.how == "killed":
      os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this one")


@pytest.mark.parametrize("count", [0, 2])
def test_results_are_in_order_and_progress_is_told(count):
  told = []
  with start_workers(count) as workers:
    for _ in range(2):  # What was told before is not told again.
      tasks = [Square(k) for k in range(9)]
      assert workers.run(tasks, lambda *x: told.append(x)) == [
        k**2 for k in range(9)
      ]
      assert told[-1] == (9, 9, 36)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_one_that_fails_calls_off_the_others(how, tmp_path):
  file = str(tmp_path / "began")
  tasks = [Endless(file), FailAfter(file, how), *([Endless(file)] * 3)]
  error, message = {
    "raises": (ValueError, "this one"),
    "killed": (
      ChildProcessError,
      "was killed, maybe because memory is short; use",
    ),
  }[how]
  with start_workers(2) as workers:
    with pytest.raises(error, match=message):
      workers.run(tasks)
    if how == "raises":
      assert workers.run([Square(3)]) == [9]


def test_one_that_fails_here():
  with start_workers(0) as workers:
    with pytest.raises(ZeroDivisionError):
      workers.run([Square(2), Divide()])
    assert workers.run([Square(3)]) == [9]


@dataclasses.dataclass(frozen=True)
class Divide:
  def run(self, tick):
    return 1 / 0


def test_work_that_was_called_off_does_not_begin():
  with start_workers(0) as workers:
    workers._tick.stop()
    with pytest.raises(futures.CancelledError):
      workers.run([Square(2)])
