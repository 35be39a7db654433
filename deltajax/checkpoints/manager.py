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

from deltajax.checkpoints.checksums import check, checksums
from deltajax.checkpoints.reading import (
  CHECKSUMS,
  complete_steps,
  DIGEST,
  LOSS,
  read_values,
  Restored,
)
from deltajax.files import digest_of

DAMAGED = "damaged"
_PARAMS = ".params"  # Where a training state holds its parameters.


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
    read_only: nothing is made, or removed after another process's crash.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    keep: Keep | None = None,
    read_only: bool = False,
  ):
    self._directory = directory.absolute()
    self._keep = None if read_only else keep or Keep()
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

  def latest_step(self) -> int | None:
    """Updates completed by the newest complete checkpoint, if any."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Updates completed by each complete checkpoint, the newest first."""
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
    data = {**data, CHECKSUMS: checksums(state), LOSS: validation_loss}
    digest = digest_of([data, config])
    self._losses[step] = validation_loss
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        data=ocp.args.JsonSave({**data, DIGEST: digest}),
        config=ocp.args.JsonSave(config),
      ),
      force=True,
    )

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

  def restore(self, step: int, like: Any) -> Restored:
    """Reads a checkpoint.

    Args:
      step: which one.
      like: a tree of arrays or ShapeDtypeStructs with the shapes and dtypes
        that are expected.

    Raises:
      ChecksumError: if anything is not what was saved.
      Exception: whatever keeps Orbax from reading it.
    """
    data, _ = self._values(step)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    state = self._manager.restore(step, args=args)["state"]
    check(state, data.pop(CHECKSUMS))
    return Restored(step=step, state=state, data=data)

  def restore_params(self, step: int, like: Any, dtype: str) -> Any:
    """Reads the parameters of a training state, and nothing else of it.

    Args:
      step: which checkpoint.
      like: the parameters as ShapeDtypeStructs, in the dtype that is wanted;
        without a sharding, they are put on JAX's default device.
      dtype: in which they were saved.

    Raises:
      ChecksumError: if they are not what was saved.
      Exception: whatever keeps Orbax from reading it.
    """
    data, _ = self._values(step)
    saved = {
      path.removeprefix(_PARAMS): x
      for path, x in data[CHECKSUMS].items()
      if path.startswith(_PARAMS)
    }
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, jax.numpy.dtype(dtype), sharding=x.sharding or device
      ),
      like,
    )
    tree = {"params": abstract}
    restore = ocp.args.PyTreeRestore(
      tree,
      restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
      partial_restore=True,
    )
    args = ocp.args.Composite(state=restore)
    # As it was saved, whatever this process computes in.
    with jax.enable_x64(True):
      params = self._manager.restore(step, args=args)["state"]["params"]
      check(params, saved)
      return jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)

  def config(self, step: int) -> dict[str, Any]:
    """The config that was saved with a checkpoint; raises as `restore`."""
    return self._values(step)[1]

  def _values(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that is no array, checked: the position in the data, the config."""
    found = read_values(self._directory, step)
    return {**found.data, CHECKSUMS: found.checksums}, found.config

  def _known_losses(self) -> dict[int, float | None]:
    """Of what is there; see `_Best`."""
    if self._keep is None or not self._keep.best:
      return {}
    losses = {}
    for step in complete_steps(self._directory):
      # Whoever restores it is told what is wrong with it.
      with contextlib.suppress(Exception):
        losses[step] = read_values(self._directory, step).validation_loss
    return losses

  def _reopen(self) -> None:
    self._manager = self._open()
    self._is_closed = False

  def _open(self) -> ocp.CheckpointManager:
    self._losses = self._known_losses()
    if self._keep is None:
      options = ocp.CheckpointManagerOptions(read_only=True, create=False)
    else:
      options = ocp.CheckpointManagerOptions(
        preservation_policy=self._keep.policy(self._losses),
        cleanup_tmp_directories=True,
      )
    return ocp.CheckpointManager(
      self._directory,
      options=options,
      item_names=("state", "data", "config"),
    )
