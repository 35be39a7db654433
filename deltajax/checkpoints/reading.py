"""Reads the checkpoints of a run: nothing here waits for another host.

What one host cannot read it alone finds out; were it to wait for the others in
between, as Orbax's own managers do, they would wait for it for ever.
"""

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltajax.checkpoints.checksums import check, check_values
from deltajax.config import ConfigError

CHECKSUMS = "checksums"  # Of the arrays.
DIGEST = "digest"  # Of all else.
LOSSES = "validation_losses"
STATE, DATA, CONFIG = "state", "data", "config"  # Items, each in a directory.
_PARAMS = ".params"  # Where a training state holds its parameters.


@dataclasses.dataclass(frozen=True)
class Values:
  """All of a checkpoint that is no array.

  Attributes:
    data: plain values that describe the position in the data.
    config: of the run.
    checksums: of each array, by its path.
    losses: on the validation set, as far as they were known, of this checkpoint
      and of those that were there when it was written.
  """

  data: dict[str, Any]
  config: dict[str, Any]
  checksums: dict[str, int]
  losses: dict[int, float]


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


@dataclasses.dataclass(frozen=True)
class Unchecked:
  """What this host has read of a checkpoint; see `Restored`.

  Attributes:
    found: what was read.
    checksums: what it must have.
  """

  found: Restored
  checksums: dict[str, int]

  def checked(self) -> Restored:
    """Returns it; all hosts must ask, once each has read its part.

    Raises:
      ChecksumError: on all hosts, if an array is not what was saved.
    """
    check(self.found.state, self.checksums)
    return self.found


def complete_steps(directory: pathlib.Path) -> list[int]:
  """Updates completed by each complete checkpoint, the newest first."""
  return sorted(ocp.utils.checkpoint_steps(directory), reverse=True)


def read_values(directory: pathlib.Path, step: int) -> Values:
  """Reads all that is no array.

  Raises:
    ChecksumError: if it is not what was saved.
    Exception: whatever keeps it from being read.
  """
  data, config = (
    dict(ocp.JsonCheckpointHandler().restore(_place(directory, step, item)))
    for item in (DATA, CONFIG)
  )
  check_values([data, config], data.pop(DIGEST, None))
  return Values(
    checksums=data.pop(CHECKSUMS),
    # Older ones hold none.
    losses={int(k): x for k, x in data.pop(LOSSES, {}).items()},
    data=data,
    config=config,
  )


def read_state(directory: pathlib.Path, step: int, like: Any) -> Unchecked:
  """Reads this host's part of a checkpoint.

  Args:
    directory: of all checkpoints.
    step: which one.
    like: a tree of arrays or ShapeDtypeStructs with the shapes and dtypes
      that are expected, and where they are to lie.

  Raises:
    ConfigError: if it holds other arrays.
    Exception: as `read_values`.
  """
  values = read_values(directory, step)
  _check_same_arrays(step, like, values.checksums)
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
    state = handler.restore(
      _place(directory, step, STATE), args=ocp.args.StandardRestore(abstract)
    )
  return Unchecked(Restored(step, state, values.data), values.checksums)


def read_params(
  directory: pathlib.Path, step: int, like: Any, dtype: str
) -> Unchecked:
  """Reads the parameters of a training state, and nothing else of it.

  Args:
    directory: of all checkpoints.
    step: which one.
    like: the parameters as ShapeDtypeStructs; without a sharding, they are put
      on JAX's default device.
    dtype: in which they were saved, and are returned.

  Raises:
    ConfigError: if it holds other arrays.
    Exception: as `read_values`.
  """
  values = read_values(directory, step)
  saved = {
    path.removeprefix(_PARAMS): x
    for path, x in values.checksums.items()
    if path.startswith(_PARAMS)
  }
  _check_same_arrays(step, like, saved)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, jax.numpy.dtype(dtype), sharding=x.sharding or device
    ),
    like,
  )
  tree = {"params": abstract}
  args = ocp.args.PyTreeRestore(
    tree,
    restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
    partial_restore=True,
  )
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    found = handler.restore(_place(directory, step, STATE), args=args)
  return Unchecked(Restored(step, found["params"], values.data), saved)


def _place(directory: pathlib.Path, step: int, item: str) -> pathlib.Path:
  """The directory of an item; Orbax takes no relative ones."""
  return directory.absolute() / str(step) / item


def _check_same_arrays(step: int, like: Any, checksums: dict[str, int]) -> None:
  """Raises ConfigError unless a checkpoint has the arrays of a tree."""
  leaves = jax.tree_util.tree_leaves_with_path(like)
  expected = {jax.tree_util.keystr(path) for path, _ in leaves}
  for these, problem in (
    (expected - checksums.keys(), "has no"),
    (checksums.keys() - expected, "has another array,"),
  ):
    if these:
      raise ConfigError(
        f"checkpoint {step} {problem} {min(these)}: it is whole, but was"
        " written by another version of this program, or of one of its"
        " libraries. Go on with that version."
      )
