"""Where numbers go: metrics.jsonl, TensorBoard and the console."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import pathlib
import secrets
import time
from typing import Any

from deltajax.config import ConfigError, RunConfig, to_dict
from deltajax.extras import install
from deltajax.files import write_file
from deltajax.training import hosts, tensorboard
from deltajax.training.appended_file import AppendedFile
from deltajax.training.run_directory import RunDirectory


class MetricsWriter:
  """Takes metrics and keeps none: that of hosts that do not write."""

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *unused: object) -> None:
    pass

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Takes the values of one line."""


class FileMetricsWriter(MetricsWriter):
  """Appends metrics to metrics.jsonl and TensorBoard.

  Lines of updates that a resumed run will do again are dropped on opening, so
  that the file reads like that of an undisturbed run. What a full disk does not
  take is kept until it does.

  Args:
    directory: of the run.
    step: updates that are completed.
    log: takes lines for the console.
  """

  def __init__(
    self, directory: RunDirectory, step: int, log: Callable[[str], None]
  ):
    _drop_lines_after(directory.metrics, step)
    directory.tensorboard.mkdir(exist_ok=True)
    self._lines = AppendedFile(directory.metrics)
    self._events = AppendedFile(tensorboard.new_file(directory.tensorboard))
    self._log = log
    self._failed = False
    self._append(b"", tensorboard.session_start(step + 1))

  def __exit__(self, *unused: object) -> None:
    for of, file in (("metrics", self._lines), ("TensorBoard", self._events)):
      if lacking := file.close():
        self._log(f"WARNING   the last {lacking} bytes of {of} are lost")

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line: `step` and the values; see `read_metrics`."""
    numbers = {name: float(value) for name, value in values.items()}
    line = {name: _json_of(value) for name, value in numbers.items()}
    text = json.dumps({"step": step, **line}, allow_nan=False) + "\n"
    self._append(text.encode(), tensorboard.scalars(step, numbers))

  def _append(self, line: bytes, event: bytes) -> None:
    problem: OSError | None = None
    for file, data in ((self._lines, line), (self._events, event)):
      try:
        file.write(data)
      except OSError as error:
        problem = error
    if problem is not None and not self._failed:
      self._log(
        f"WARNING   metrics could not be written ({problem}); the run goes on,"
        " and they are kept until they can be"
      )
    self._failed = problem is not None


class WandbWriter(MetricsWriter):
  """Sends metrics to Weights & Biases, all sessions of a run as one run there.

  What goes wrong there is said once, counted, and ends nothing.

  Args:
    directory: of the run; a file in it remembers the run's id.
    config: of the run.
    log: takes lines for the console.
  """

  def __init__(
    self,
    directory: RunDirectory,
    config: RunConfig,
    log: Callable[[str], None],
  ):
    self._log = log
    self._lost = 0
    self._run: Any = None
    with self._surviving():
      directory.wandb.mkdir(exist_ok=True)
      remembered = directory.wandb / "id.txt"
      if not remembered.exists():
        write_file(remembered, secrets.token_hex(4))
      self._run = import_wandb().init(
        project=config.training.wandb_project,
        name=directory.root.name,
        id=remembered.read_text(),
        resume="allow",
        dir=directory.root,
        config=to_dict(config),
      )

  def __exit__(self, *unused: object) -> None:
    if self._run is not None:
      with self._surviving():
        self._run.finish()
    if self._lost:
      self._log(
        f"WARNING   {self._lost} lines of metrics are not in Weights & Biases;"
        " metrics.jsonl has them"
      )

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Sends one line."""
    numbers = {name: float(value) for name, value in values.items()}
    sent = False
    if self._run is not None:
      with self._surviving():
        self._run.log(numbers, step=step)
        sent = True
    self._lost += not sent

  @contextlib.contextmanager
  def _surviving(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      if not self._lost:
        self._log(
          "WARNING   Weights & Biases failed, the run goes on"
          f" ({type(error).__name__}: {error})"
        )


class SeveralWriters(MetricsWriter):
  """Writes to several places.

  Args:
    writers: of each.
  """

  def __init__(self, writers: Sequence[MetricsWriter]):
    self._writers = writers

  def __exit__(self, *unused: object) -> None:
    with contextlib.ExitStack() as stack:  # Ends all, whatever one raises.
      for writer in self._writers:
        stack.push(writer)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line to each."""
    for writer in self._writers:
      writer.write(step, values)


def import_wandb() -> Any:
  """The package; raises ConfigError, with the remedy, if it is not there."""
  try:
    import wandb
  except ImportError as error:
    raise ConfigError(
      f"training.wandb_project needs wandb ({error}): {install('wandb')}, or"
      " leave it out."
    ) from None
  return wandb


def read_metrics(path: pathlib.Path) -> list[dict[str, float]]:
  """The lines of a metrics file; `step` is an int.

  JSON has no NaN and no infinity: they are the strings that Python's `float`
  and protobuf's JSON understand ("NaN", "Infinity", "-Infinity"). A last line
  that was torn, by a process that was killed, is left out.

  Raises:
    ConfigError: if another line is not JSON; which one.
    OSError: if there is no such file, or it cannot be read.
  """
  return [values for _, values in _parsed_lines(path)]


def _parsed_lines(
  path: pathlib.Path,
) -> Iterator[tuple[str, dict[str, float]]]:
  lines = path.read_text().splitlines()
  for number, line in enumerate(lines, 1):
    try:
      values = json.loads(line)
    except json.JSONDecodeError:
      if number < len(lines):
        raise ConfigError(f"{path}, line {number}: not JSON.") from None
      return
    step = values.pop("step")
    yield line, {"step": step, **{k: float(x) for k, x in values.items()}}


def _json_of(value: float) -> float | str:
  if math.isfinite(value):
    return value
  return (
    "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
  )


def _drop_lines_after(path: pathlib.Path, step: int) -> None:
  """Rewrites a metrics file, at once or not at all, up to an update.

  After update 0 the run begins anew.
  """
  lines = _parsed_lines(path) if path.exists() else ()
  kept = [line for line, values in lines if step and values["step"] <= step]
  write_file(path, "".join(line + "\n" for line in kept))


def metrics_writer(
  directory: RunDirectory,
  config: RunConfig,
  step: int,
  log: Callable[[str], None],
) -> MetricsWriter:
  """The writer of this host: one host writes.

  Args:
    directory: of the run.
    config: of the run.
    step: updates that are completed.
    log: takes lines for the console.
  """
  if not hosts.is_main_host():
    return MetricsWriter()
  files = FileMetricsWriter(directory, step, log)
  if config.training.wandb_project is None:
    return files
  return SeveralWriters([files, WandbWriter(directory, config, log)])


@dataclasses.dataclass(frozen=True)
class Rates:
  """How fast a run goes, validation and checkpoints left out.

  Attributes:
    tokens: that are learned from, a second.
    updates: a second.
    data_wait: share of the time in which the loop waited for its batch.
    seconds_left: of the run.
  """

  tokens: float
  updates: float
  data_wait: float
  seconds_left: float


class Progress:
  """One console line: step, loss, tokens per second, time left.

  Args:
    first_step: updates completed before this session.
    last_step: updates at which it ends.
    clock: seconds; replaced in tests.
  """

  def __init__(
    self,
    first_step: int,
    last_step: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._last_step = last_step
    self._clock = clock
    self._seen_step = first_step
    self._seen_time = clock()
    self._tokens = self._waited = 0.0

  def count(self, tokens: float) -> None:
    """Adds the tokens of an update to the current window."""
    self._tokens += tokens

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Counts the time that the block takes as waiting for data."""
    begin = self._clock()
    yield
    self._waited += self._clock() - begin

  def skip(self, step: int) -> None:
    """Starts measuring again: leaves out validation and checkpoints."""
    self._seen_step, self._seen_time = step, self._clock()
    self._tokens = self._waited = 0.0

  def rates(self, step: int) -> Rates:
    """The rates since the last call."""
    now = self._clock()
    elapsed = max(now - self._seen_time, 1e-9)
    steps = max(step - self._seen_step, 1)
    rates = Rates(
      tokens=self._tokens / elapsed,
      updates=steps / elapsed,
      data_wait=self._waited / elapsed,
      seconds_left=(self._last_step - step) * elapsed / steps,
    )
    self.skip(step)
    return rates

  def line(self, step: int, loss: float, rates: Rates) -> str:
    """The console line."""
    width = len(str(self._last_step))
    return (
      f"step {step:{width}d}/{self._last_step}  loss {loss:.4f}"
      f"  {readable(rates.tokens)} tok/s  {duration(rates.seconds_left)} left"
    )


def duration(seconds: float) -> str:
  """Hours, minutes and seconds, as short as they can be."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}h{minutes:02d}m"
  return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def readable(number: float) -> str:
  """A number with three significant digits and a suffix: 1.23M."""
  suffixes = ("", "k", "M", "G", "T")
  power = 0
  while abs(number) >= 999.5 and power < len(suffixes) - 1:
    number, power = number / 1000, power + 1
  return f"{number:.3g}{suffixes[power]}"
