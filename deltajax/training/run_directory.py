"""A run's directory: who it belongs to, and where things lie in it."""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket

import jax

from deltajax.config import (
  ConfigError,
  differences,
  from_dict,
  RunConfig,
  to_dict,
)
from deltajax.files import naming, temporary_of, try_lock, write_file

LOCK = "lock"
_STACKS = "stacks-{}.txt"

# Fields, and whole sections, that may change between the sessions of one run:
# where it runs, how it computes what it computes, and what it writes down.
MUTABLE = frozenset(
  {
    "health.hang_exits",
    "health.hang_seconds",
    "health.skip_limit",
    "hosts",
    "mesh",
    "model.attention",
    "model.depth_attention",
    "model.read_group",
    "model.remat",
    "model.scan",
    "training.accept",
    "training.accumulation",
    "training.stop_after",
    "training.log_every",
    "training.eval_every",
    "training.eval_routing",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.keep_every",
    "training.keep_best",
    "training.wandb_project",
    "data.data_dir",
  }
)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
  """Paths of a run.

  Attributes:
    root: the directory itself.
  """

  root: pathlib.Path

  @property
  def config(self) -> pathlib.Path:
    """The run's config as JSON."""
    return self.root / "config.json"

  @property
  def metrics(self) -> pathlib.Path:
    """One JSON object a line."""
    return self.root / "metrics.jsonl"

  @property
  def tensorboard(self) -> pathlib.Path:
    """Event files."""
    return self.root / "tensorboard"

  @property
  def checkpoints(self) -> pathlib.Path:
    """Orbax checkpoints, named by completed updates."""
    return self.root / "checkpoints"

  @property
  def stacks(self) -> pathlib.Path:
    """Stacks of all threads, where something hung."""
    return self.root / _STACKS.format(jax.process_index())

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Keeps other processes out while the block runs.

    The lock ends with the process, however that ends. A directory that is made
    for it goes where no run begins in it.

    Raises:
      ConfigError: if another process is in.
    """
    is_new = not self.root.exists()
    self.root.mkdir(parents=True, exist_ok=True)
    with (self.root / LOCK).open("a+") as file:
      if not try_lock(file):
        file.seek(0)
        raise ConfigError(
          f"--workdir {self.root} is in use by process {file.read().strip()};"
          " two runs would destroy each other's files. Wait for it, or name"
          " another directory."
        )
      with naming(self.root / LOCK):
        file.truncate(0)
        file.write(f"{os.getpid()} of {socket.gethostname()}\n")
        file.flush()
      try:
        yield
      finally:
        if is_new and not self.config.exists():
          shutil.rmtree(self.root, ignore_errors=True)

  @property
  def wandb(self) -> pathlib.Path:
    """What Weights & Biases keeps here."""
    return self.root / "wandb"

  def load_config(self) -> RunConfig:
    """The config that the run was started with.

    Raises:
      ConfigError: if config.json is missing, or is none of a run.
    """
    if not self.config.is_file():
      raise ConfigError(
        f"{self.root} is not a run directory: it has no config.json."
      )
    try:
      return from_dict(RunConfig, json.loads(self.config.read_text()))
    except ConfigError as error:
      raise ConfigError(f"{self.config}: {error}") from None
    except ValueError as error:  # Of json, or of UTF-8.
      raise ConfigError(f"{self.config} is not JSON: {error}.") from None

  def check(self, config: RunConfig) -> None:
    """Raises ConfigError unless the directory is new or this run's own.

    Args:
      config: of the run that wants to use it. Fields in `MUTABLE` may differ.
    """
    if self.root.exists() and not self.root.is_dir():
      raise ConfigError(f"--workdir {self.root} is a file, not a directory.")
    if not self.config.exists():
      # A crash, or a hang, before the config was written leaves these.
      ours = {
        self.root / LOCK,
        temporary_of(self.config),
        *self.root.glob(_STACKS.format("*")),
      }
      if any(x.is_file() and x not in ours for x in self.root.rglob("*")):
        raise ConfigError(
          f"--workdir {self.root} holds files but no config.json, so it is no"
          " run directory; name an empty or new one."
        )
      return
    check_same_run(self.load_config(), config, f"--workdir {self.root}")

  def claim(self, config: RunConfig) -> None:
    """Writes config.json, at once or not at all.

    One that is there stays, unless the run was allowed to become another.
    """
    if self.config.exists() and not config.training.accept:
      return
    self.root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_dict(config), indent=2) + "\n"
    write_file(self.config, text)


def check_same_run(old: RunConfig, new: RunConfig, what: str) -> None:
  """Raises ConfigError if configs differ in more than `MUTABLE` fields.

  What `training.accept` of the new one names may differ, too.

  Args:
    old: what the run was started with.
    new: what it is to be resumed with.
    what: whose config `old` is.
  """
  may_change = MUTABLE | set(new.training.accept)
  changed = [
    f"  {name}: {before!r} in the run, {after!r} now"
    for name, (before, after) in differences(old, new).items()
    if may_change.isdisjoint((name, name.split(".")[0]))
  ]
  if changed:
    raise ConfigError(
      f"{what} belongs to another run; nothing was changed. Name another"
      " directory, or resume with these fields as they were (or name those that"
      " may change: --training.accept):\n" + "\n".join(changed)
    )
