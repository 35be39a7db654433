"""Orbax checkpoints of a run: state, data position and config together.

A checkpoint is named by the number of completed updates.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint holds.

  Attributes:
    step: completed updates.
    state: the tree that was saved.
    data: plain values that describe the position in the data.
  """

  step: int
  state: Any
  data: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run directory.

  Use as a context manager: leaving it waits for pending writes.

  Args:
    directory: is made if there is none.
    keep: how many of the newest are kept.
    read_only: nothing is made, or removed after another process's crash.
  """

  def __init__(
    self, directory: pathlib.Path, keep: int = 1, read_only: bool = False
  ):
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else keep,
        create=not read_only,
        read_only=read_only,
      ),
      item_names=("state", "data", "config"),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *unused: object) -> None:
    self._manager.close()

  def latest_step(self) -> int | None:
    """Updates completed by the newest complete checkpoint, if any."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: Any,
    data: dict[str, Any],
    config: dict[str, Any],
  ) -> None:
    """Writes a checkpoint and waits until it is complete.

    Args:
      step: completed updates.
      state: tree of arrays.
      data: plain values that describe the position in the data.
      config: of the run.
    """
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        data=ocp.args.JsonSave(data),
        config=ocp.args.JsonSave(config),
      ),
      force=True,
    )
    # The next update donates the buffers that are being written.
    self._manager.wait_until_finished()

  def restore(self, step: int, like: Any) -> Restored:
    """Reads a checkpoint.

    Args:
      step: which one.
      like: a tree of arrays or ShapeDtypeStructs with the shapes and dtypes
        that are expected.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    found = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract),
        data=ocp.args.JsonRestore(),
      ),
    )
    return Restored(step=step, state=found["state"], data=found["data"])

  def restore_params(self, step: int, like: Any) -> Any:
    """Reads the parameters of a training state, and nothing else of it.

    Args:
      step: which checkpoint.
      like: the parameters as ShapeDtypeStructs; without a sharding, they are
        put on JAX's default device.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=x.sharding or device
      ),
      {"params": like},
    )
    restore = ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
    )
    args = ocp.args.Composite(state=restore)
    return self._manager.restore(step, args=args)["state"]["params"]

  def config(self, step: int) -> dict[str, Any]:
    """The config that was saved with a checkpoint."""
    found = self._manager.restore(
      step, args=ocp.args.Composite(config=ocp.args.JsonRestore())
    )
    return found["config"]
