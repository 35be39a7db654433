"""Does a run come back, bit for bit, from whatever kills it?

    python benchmarks/faults.py
    python benchmarks/faults.py --kills 3 --terms 1 --damages 1 --json F

A small run is made once undisturbed, and once for each kind of fault with the
same command: SIGKILL and SIGTERM at random moments, start-up and checkpoints
among them, and damage to the newest checkpoint between two sessions. So is a
data set, whose preparation is killed at random moments. Exit code 1 unless
every sequence of losses is that of the undisturbed run, and every file that of
the undisturbed preparation.
"""

from collections.abc import Callable, Iterator
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.training.metrics import read_metrics
from deltajax.training.stopping import PREEMPTED, RUN_ERROR
from train.cli import check_json_file, main, write_json_file

ROOT = pathlib.Path(__file__).parents[1]
CHECKPOINT_EVERY = 4
# Of the corpus that is prepared.
PARTS, DOCUMENTS = 12, 2000
POLL_SECONDS = 0.005


@dataclasses.dataclass(frozen=True)
class Options:
  """What happens to the run.

  Attributes:
    kills: SIGKILLs.
    terms: SIGTERMs.
    damages: newest checkpoints that are damaged.
    preparations: SIGKILLs of a preparation.
    steps: updates of the run.
    seed: of the moments.
    dataset: that it reads, see `--data.dataset`.
    data_dir: where that is packed; None: in a temporary directory.
    json: also write the outcomes to this file.
  """

  kills: int = 30
  terms: int = 5
  damages: int = 5
  preparations: int = 10
  steps: int = 300
  seed: int = 0
  dataset: str = "python_stdlib"
  data_dir: pathlib.Path | None = None
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a run, or of a preparation.

  Attributes:
    fault: what was done to it.
    times: how often.
    sessions: processes that it took.
    lost_updates: updates that had to be made again.
    equal: whether all losses, or files, are those of the undisturbed one.
  """

  fault: str
  times: int
  sessions: int
  lost_updates: int
  equal: bool

  def __str__(self) -> str:
    verdict = "equal bit for bit" if self.equal else "DIFFERENT"
    return (
      f"{self.fault:<12} {self.times:>3} times, {self.sessions:>3} sessions,"
      f" {self.lost_updates:>4} updates made again: {verdict}"
    )


class Run:
  """One run in processes of its own."""

  def __init__(self, options: Options, workdir: pathlib.Path, data: str):
    """Starts nothing yet."""
    self._workdir = workdir
    self._arguments = [
      *("configs/quickstart.py", "--workdir", str(workdir)),
      *("--data.dataset", options.dataset, "--data.data-dir", data),
      *("--model.width", "16", "--model.num-layers", "4"),
      *("--model.head-dim", "8", "--model.mlp-width", "16"),
      *("--data.sequence-length", "32", "--training.batch-size", "4"),
      *("--optimizer.warmup-steps", "10"),
      *("--training.steps", str(options.steps), "--training.log-every", "1"),
      *("--training.eval-every", "50", "--training.eval-sequences", "8"),
      *("--training.checkpoint-every", str(CHECKPOINT_EVERY)),
    ]
    self._sessions = 0

  @property
  def checkpoints(self) -> pathlib.Path:
    """Where they are."""
    return self._workdir / "checkpoints"

  @property
  def sessions(self) -> int:
    """Processes that were started."""
    return self._sessions

  def start(self) -> subprocess.Popen:
    """Starts a process that goes on with the run."""
    self._sessions += 1
    return subprocess.Popen(
      [sys.executable, "-m", "train.pretrain", *self._arguments],
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )

  def finish(self) -> None:
    """Goes on to the end."""
    process = self.start()
    _, errors = process.communicate()
    if process.returncode:
      raise SystemExit(f"the run failed: {errors}")

  def made(self) -> int:
    """Updates that are written down."""
    return max(self.losses(), default=0)

  def losses(self) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each update; a torn line is no line."""
    file = self._workdir / "metrics.jsonl"
    found = {}
    for values in read_metrics(file) if file.exists() else ():
      if "train/loss" in values:
        norm = values["train/grad_norm"]
        found[values["step"]] = values["train/loss"], norm
    return found


def moments(
  options: Options, times: int, rng: random.Random
) -> Iterator[Callable[[Run, subprocess.Popen], None]]:
  """Functions that wait for a random moment of a run.

  One in five is while the process starts; the others lie evenly over the
  updates that are left, and fall into checkpoints too.
  """

  def at_start(run: Run, process: subprocess.Popen) -> None:
    del run
    wait(process, lambda: False, rng.uniform(0.0, 4.0))

  for i in range(times):
    if i % 5 == 4:
      yield at_start
      continue
    share = rng.random() / (times - i)

    def at_update(run: Run, process: subprocess.Popen, share=share) -> None:
      made = run.made()
      target = made + 1 + int(share * (options.steps - made - 1))
      wait(process, lambda: run.made() >= target)
      time.sleep(rng.uniform(0.0, 0.05))

    yield at_update


def wait(
  process: subprocess.Popen,
  until: Callable[[], bool],
  seconds: float = float("inf"),
) -> None:
  """Returns when something is so, time is up, or the process has ended."""
  end = time.monotonic() + seconds
  while process.poll() is None and time.monotonic() < end and not until():
    time.sleep(POLL_SECONDS)


def wait_for_progress(run: Run, process: subprocess.Popen) -> None:
  """Returns when an update was made since this was called."""
  before = run.made()
  wait(process, lambda: run.made() > before)


def kill(run: Run, options: Options, rng: random.Random) -> int:
  """SIGKILL at random moments; returns the updates that were lost."""
  lost = 0
  for until_moment in moments(options, options.kills, rng):
    process = run.start()
    until_moment(run, process)
    process.kill()
    process.wait()
    lost += run.made() - newest(run)
  run.finish()
  return lost


def terminate(run: Run, options: Options, rng: random.Random) -> int:
  """SIGTERM during the updates; nothing may be lost."""
  for until_moment in moments(options, options.terms, rng):
    process = run.start()
    # Before the loop has begun there is nothing to save.
    wait_for_progress(run, process)
    until_moment(run, process)
    process.send_signal(signal.SIGTERM)
    process.wait()
    if process.returncode not in (PREEMPTED, 0):
      raise SystemExit(f"exit code {process.returncode} after SIGTERM")
    if newest(run) != run.made():
      raise SystemExit("SIGTERM: the last update was not saved")
  run.finish()
  return 0


def damage(run: Run, options: Options, rng: random.Random) -> int:
  """Breaks the newest checkpoint after a kill; returns the updates lost."""
  lost = 0
  for until_moment in moments(options, options.damages, rng):
    process = run.start()
    wait(process, lambda: run.made() > newest(run) + CHECKPOINT_EVERY)
    until_moment(run, process)
    process.kill()
    process.wait()
    resumes_from = newest(run)
    root = run.checkpoints / str(resumes_from)
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    if files:
      path = rng.choice([x for x in files if x.stat().st_size] or files)
      raw = bytearray(path.read_bytes())
      how = rng.choice(("delete", "cut", "flip"))
      if how == "delete":
        path.unlink()
      elif how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
      else:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
      resumes_from = newest(run, below=resumes_from)
    lost += run.made() - resumes_from
  run.finish()
  return lost


def newest(run: Run, below: float = float("inf")) -> int:
  """Updates of the newest complete checkpoint with fewer than `below`."""
  names = os.listdir(run.checkpoints) if run.checkpoints.is_dir() else []
  updates = [int(name) for name in names if name.isdigit()]
  return max((x for x in updates if x < below), default=0)


class Preparation:
  """A data set that is prepared in processes of its own."""

  def __init__(self, scratch: pathlib.Path):
    """Writes the sources; prepares nothing yet."""
    self._scratch = scratch
    self.sessions = 0
    (scratch / "sources").mkdir(parents=True)
    for k in range(PARTS):
      lines = (
        json.dumps({"text": f"document {i} of part {k}. " * (i % 40)}) + "\n"
        for i in range(DOCUMENTS)
      )
      (scratch / "sources" / f"{k}.jsonl").write_text("".join(lines))

  def start(self, name: str) -> subprocess.Popen:
    """Starts a process that goes on with a data set of this name."""
    self.sessions += 1
    return subprocess.Popen(
      [
        *(sys.executable, "-m", "train.prepare_data", "build"),
        *(self.out(name), "--sources", self._scratch / "sources"),
        *("--tokenizer", "bytes", "--sequence-length", "128"),
        *("--workers", "2"),
      ],
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )

  def out(self, name: str) -> pathlib.Path:
    """Where it comes to lie."""
    return self._scratch / name

  def finish(self, name: str) -> dict[str, bytes]:
    """Goes on to the end; returns the files, by name."""
    process = self.start(name)
    _, errors = process.communicate()
    if process.returncode:
      raise SystemExit(f"preparation failed: {errors}")
    left = {path.name for path in self._scratch.glob(f"{name}*")}
    if left != {name}:
      raise SystemExit(f"preparation left {sorted(left)}")
    files = sorted(self.out(name).rglob("*"))
    return {str(x.relative_to(self.out(name))): x.read_bytes() for x in files}


def kill_preparations(options: Options, scratch: pathlib.Path) -> Outcome:
  """SIGKILL at random moments; a set that was done before is begun anew."""
  preparation = Preparation(scratch)
  begin = time.monotonic()
  expected = preparation.finish("undisturbed")
  seconds = time.monotonic() - begin
  rng = random.Random(options.seed)
  equal = True
  for _ in range(options.preparations):
    process = preparation.start("killed")
    wait(process, lambda: False, rng.uniform(0.0, seconds))
    process.kill()
    process.communicate()
    if preparation.out("killed").exists():
      equal &= preparation.finish("killed") == expected
      shutil.rmtree(preparation.out("killed"))
  equal &= preparation.finish("killed") == expected
  return Outcome(
    "preparations", options.preparations, preparation.sessions, 0, equal
  )


FAULTS = {"kills": kill, "terms": terminate, "damages": damage}


def command(arguments: list[str]) -> None:
  """Breaks a run, and prints what became of it."""
  options = tyro.cli(Options, args=arguments, description=__doc__)
  check_json_file(options.json)
  with tempfile.TemporaryDirectory() as directory:
    outcomes = _outcomes(options, pathlib.Path(directory))
    write_json_file(options.json, [dataclasses.asdict(x) for x in outcomes])
  if not all(x.equal for x in outcomes):
    raise SystemExit(RUN_ERROR)


def _outcomes(options: Options, scratch: pathlib.Path) -> list[Outcome]:
  data = str(options.data_dir or scratch / "data")
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "cache"))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
  undisturbed = Run(options, scratch / "undisturbed", data)
  undisturbed.finish()
  expected: Any = undisturbed.losses()
  outcomes = []
  for name, fault in FAULTS.items():
    times = getattr(options, name)
    if not times:
      continue
    run = Run(options, scratch / name, data)
    lost = fault(run, options, random.Random(options.seed))
    outcome = Outcome(name, times, run.sessions, lost, run.losses() == expected)
    print(outcome, flush=True)
    outcomes.append(outcome)
    shutil.rmtree(scratch / name)
  if options.preparations:
    outcome = kill_preparations(options, scratch / "preparations")
    print(outcome, flush=True)
    outcomes.append(outcome)
  return outcomes


if __name__ == "__main__":
  main(command)
