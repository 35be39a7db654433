"""Files that a run appends to, whatever the disk does."""

import contextlib
import pathlib


class AppendedFile:
  """Takes bytes in order, also while the disk refuses them.

  Nothing is torn, lost or written twice where a disk is full for a while: what
  it did not take is kept in memory, and goes first the next time.

  Args:
    path: of the file; made if it is not there.
  """

  def __init__(self, path: pathlib.Path):
    self._file = path.open("ab", buffering=0)
    self._waiting = b""

  def write(self, data: bytes) -> None:
    """Appends what waits, then the data.

    Raises:
      OSError: if the disk did not take all; the rest is kept.
    """
    self._waiting += data
    while self._waiting:
      self._waiting = self._waiting[self._file.write(self._waiting) :]

  def close(self) -> int:
    """Closes the file; returns how many bytes it lacks."""
    with contextlib.suppress(OSError):  # Told by what is returned.
      self.write(b"")
    with contextlib.suppress(OSError):
      self._file.close()
    return len(self._waiting)
