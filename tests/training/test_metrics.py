import json
import math

import pytest

from deltajax.config import ConfigError
from deltajax.training.metrics import (
  duration,
  FileMetricsWriter,
  MetricsWriter,
  Progress,
  Rates,
  read_metrics,
  readable,
  SeveralWriters,
)
from deltajax.training.run_directory import RunDirectory
from tests.training.test_tensorboard import Full


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


def no_json(text):
  raise ValueError(text)


def test_numbers_that_json_does_not_have(tmp_path):
  directory = RunDirectory(tmp_path)
  values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1}
  with FileMetricsWriter(directory, 0, print) as writer:
    writer.write(1, values)
    writer.write(2, {"d": 3})
  text = directory.metrics.read_text()
  for line in text.splitlines():
    json.loads(line, parse_constant=no_json)
  assert '"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1' in text
  first, second = read_metrics(directory.metrics)
  assert math.isnan(first.pop("a"))
  assert first == {"step": 1, "b": math.inf, "c": -math.inf, "d": 0.1}
  assert second == {"step": 2, "d": 3.0}
  # What is read again is kept as it was.
  with FileMetricsWriter(directory, 2, print):
    assert directory.metrics.read_text() == text


def test_lines_that_cannot_be_read(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"st')
  assert read_metrics(path) == [{"step": 1}]
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: not JSON"):
    read_metrics(path)


def test_what_is_lost_is_said_of_each_file(tmp_path):
  lines = []
  with FileMetricsWriter(RunDirectory(tmp_path), 0, lines.append) as writer:
    writer._lines._file, writer._events._file = Full(99), Full(3)
    writer.write(1, {"a": 1})
  assert len(lines) == 2
  assert "metrics could not be written" in lines[0]
  assert lines[1].endswith("bytes of TensorBoard are lost")


def test_every_writer_is_closed():
  closed = []

  class Writer(MetricsWriter):
    def __init__(self, name):
      self.name = name

    def __exit__(self, *unused):
      closed.append(self.name)
      raise OSError(self.name)

  with (
    pytest.raises(OSError, match=r"one|two"),
    SeveralWriters([Writer("one"), Writer("two")]),
  ):
    pass
  assert sorted(closed) == ["one", "two"]
