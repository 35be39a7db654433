"""Orbax checkpoints of a run: state, data position and config together.

A checkpoint is named by the number of completed updates. It is written while
the run goes on, and counts once it is complete. What cannot be written costs
the run nothing but the checkpoint.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltajax.checkpoints.checksums import checksums
from deltajax.checkpoints.reading import (
  CHECKSUMS,
  complete_steps,
  CONFIG,
  DATA,
  DIGEST,
  LOSSES,
  read_state,
  read_values,
  STATE,
  Unchecked,
)
from deltajax.files import digest_of

DAMAGED = "damaged"


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints are kept; the others are removed.

  Attributes:
    newest: how many of the newest.
    every: those at multiples of this number of updates too; None: of none.
    best: how many of those with the least validation loss, too.
  """

  newest: int = 1
  every: int | None = None
  best: int = 0

  def policy(
    self, losses: Mapping[int, float | None]
  ) -> ocp.checkpoint_managers.PreservationPolicy:
    """The same for Orbax; see `_Best` for the losses."""
    policies = ocp.checkpoint_managers
    kept: list[Any] = [policies.LatestN(self.newest)]
    if self.every is not None:
      kept.append(policies.EveryNSteps(self.every))
    if self.best:
      kept.append(_Best(self.best, losses))
    return policies.AnyPreservationPolicy(kept)


@dataclasses.dataclass
class _Best:
  """Keeps the checkpoints with the least validation loss.

  Attributes:
    number: how many.
    losses: of each checkpoint that could be read, None where it has none; one
      that could not is kept, since it may be the best.
  """

  number: int
  losses: Mapping[int, float | None]

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Whether each is kept; as Orbax asks."""
    del context
    steps = [info.step for info in checkpoints]
    known = [
      (loss, step)
      for step in steps
      if (loss := self.losses.get(step)) is not None
    ]
    best = {step for _, step in sorted(known)[: self.number]}
    return [step in best or step not in self.losses for step in steps]


class Checkpoints:
  """The checkpoints of one run directory.

  Use as a context manager: leaving it waits for pending writes.

  Args:
    directory: is made if there is none.
    keep: which are kept.
  """

  def __init__(self, directory: pathlib.Path, keep: Keep | None = None):
    self._directory = directory.absolute()
    self._keep = keep or Keep()
    self._manager = self._open()
    self._is_closed = False

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type | None, *unused: object) -> None:
    try:
      self._manager.close()
    except Exception:
      # What ends the block is worth more than a checkpoint that failed too.
      if kind is None:
        raise

  def steps(self) -> list[int]:
    """Updates completed by each complete checkpoint, the newest first."""
    if self._is_closed:  # It may count one that failed.
      return complete_steps(self._directory)
    return sorted(self._manager.all_steps(), reverse=True)

  def save(
    self,
    step: int,
    state: Any,
    data: dict[str, Any],
    config: dict[str, Any],
    validation_loss: float | None = None,
  ) -> None:
    """Starts to write a checkpoint; waits for an earlier one.

    The arrays may be given up once this returns.

    Args:
      step: completed updates.
      state: tree of arrays.
      data: plain values that describe the position in the data.
      config: of the run.
      validation_loss: decides which checkpoints are best.

    Raises:
      Exception: whatever kept this one, or the earlier one, from being written;
        the complete ones are not touched.
    """
    if self._is_closed:
      self._reopen()
    self._losses[step] = validation_loss
    known = {
      str(k): x
      for k in (*self.steps(), step)
      if (x := self._losses.get(k)) is not None
    }
    data = {**data, CHECKSUMS: checksums(state), LOSSES: known}
    digest = digest_of([data, config])
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{
          STATE: ocp.args.StandardSave(state),
          DATA: ocp.args.JsonSave({**data, DIGEST: digest}),
          CONFIG: ocp.args.JsonSave(config),
        }
      ),
      force=True,
    )

  def note_loss(self, step: int, validation_loss: float) -> None:
    """Takes the loss of a checkpoint that was written without one."""
    self._losses[step] = validation_loss

  def wait(self) -> None:
    """Waits until nothing is being written; raises as `save`."""
    self._manager.wait_until_finished()

  def is_writing(self) -> bool:
    """Whether a checkpoint is being written now."""
    return self._manager.is_saving_in_progress()

  def check(self) -> None:
    """Raises what kept a checkpoint from being written, if that is known."""
    if not self.is_writing():
      self.wait()

  def probe(self) -> None:
    """Raises OSError if no checkpoint can be begun now.

    Orbax finds that out in a thread, for which others then wait in vain, and
    the process with them when it ends.
    """
    if jax.process_index() == 0:
      place = self._directory / ".probe"
      place.mkdir(exist_ok=True)  # A process that was killed may leave it.
      place.rmdir()

  def start_again(self) -> None:
    """Forgets a checkpoint that could not be written, and removes its parts."""
    with contextlib.suppress(Exception):  # What is wrong is known.
      self._manager.close()
    self._is_closed = True
    # Where this fails too, the next attempt to save tries again.
    with contextlib.suppress(Exception):
      self._reopen()

  def reload(self) -> None:
    """Looks again at what is there."""
    self._manager.reload()

  def put_aside(self, steps: list[int]) -> pathlib.Path:
    """Moves checkpoints to where they are not found; returns the place."""
    place = self._directory.parent / DAMAGED
    place.mkdir(exist_ok=True)
    for step in steps:
      if (place / str(step)).exists():
        shutil.rmtree(place / str(step))
      (self._directory / str(step)).rename(place / str(step))
    self.reload()
    return place

  def read(self, step: int, like: Any) -> Unchecked:
    """Reads this host's part of a checkpoint; see `read_state`."""
    return read_state(self._directory, step, like)

  def config(self, step: int) -> dict[str, Any]:
    """The config that was saved with a checkpoint; raises as `read_values`."""
    return read_values(self._directory, step).config

  def _known_losses(self) -> dict[int, float | None]:
    """Of what is there; see `_Best`."""
    if not self._keep.best:
      return {}
    losses: dict[int, float | None] = {}
    for step in complete_steps(self._directory):
      # Whoever restores it is told what is wrong with it.
      with contextlib.suppress(Exception):
        found = read_values(self._directory, step).losses
        losses = found | {step: found.get(step)} | losses
    return losses

  def _reopen(self) -> None:
    self._manager = self._open()
    self._is_closed = False

  def _open(self) -> ocp.CheckpointManager:
    self._losses = self._known_losses()
    self._directory.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
      preservation_policy=self._keep.policy(self._losses),
      cleanup_tmp_directories=True,
      # For either, hosts would wait for each other.
      create=False,
      save_root_metadata=False,
    )
    return ocp.CheckpointManager(
      self._directory, options=options, item_names=(STATE, DATA, CONFIG)
    )
