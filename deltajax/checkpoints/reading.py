"""Reads the checkpoints of a run: nothing here waits for another host.

What one host cannot read it alone finds out; were it to wait for the others in
between, as Orbax's own managers do, they would wait for it for ever.
"""

import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from deltajax.checkpoints.checksums import check, check_values

CHECKSUMS = "checksums"  # Of the arrays.
DIGEST = "digest"  # Of all else.
LOSS = "validation_loss"
_PARAMS = ".params"  # Where a training state holds its parameters.


@dataclasses.dataclass(frozen=True)
class Values:
  """All of a checkpoint that is no array.

  Attributes:
    data: plain values that describe the position in the data.
    config: of the run.
    checksums: of each array, by its path.
    validation_loss: if it came with one.
  """

  data: dict[str, Any]
  config: dict[str, Any]
  checksums: dict[str, int]
  validation_loss: float | None


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
  read = ocp.JsonCheckpointHandler().restore
  place = directory / str(step)
  data, config = dict(read(place / "data")), dict(read(place / "config"))
  check_values([data, config], data.pop(DIGEST, None))
  return Values(
    checksums=data.pop(CHECKSUMS),
    # Older ones hold none.
    validation_loss=data.pop(LOSS, None),
    data=data,
    config=config,
  )
