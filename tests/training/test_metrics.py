import pytest

from deltajax.training.metrics import duration, Progress, Rates, readable


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_rates_leave_out_validation_and_checkpoints():
  clock = Clock()
  progress = Progress(0, 100, clock)
  clock.now += 20  # 20 updates of a second
  progress.count(2000)
  assert progress.rates(20) == Rates(100.0, 1.0, 0.0, 80.0)
  clock.now += 10
  progress.count(1000)
  clock.now += 500  # a long validation after update 30
  progress.skip(30)
  clock.now += 10
  progress.count(1000)
  with progress.waiting():
    clock.now += 10
  assert progress.rates(40) == Rates(50.0, 0.5, 0.5, 120.0)


def test_a_resumed_session_counts_its_own_steps():
  clock = Clock()
  progress = Progress(90, 100, clock)
  clock.now += 4
  progress.count(400)
  rates = progress.rates(92)
  assert rates == Rates(100.0, 0.5, 0.0, 16.0)
  assert progress.line(92, 1.5, rates) == (
    "step  92/100  loss 1.5000  100 tok/s  16s left"
  )


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (61, "1m01s"), (7265, "2h01m")],
)
def test_duration(seconds, text):
  assert duration(seconds) == text


@pytest.mark.parametrize(
  ("number", "text"),
  [
    (0, "0"),
    (999, "999"),
    (1000, "1k"),
    (12_345, "12.3k"),
    (2.5e15, "2.5e+03T"),
  ],
)
def test_readable(number, text):
  assert readable(number) == text
