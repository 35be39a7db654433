"""Files that are written whole, one process at a time; digests of values."""

from collections.abc import Callable, Iterator
import contextlib
import errno
import hashlib
import json
import os
import pathlib
from typing import Any, IO

# Of file systems that know no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def temporary_of(path: pathlib.Path) -> pathlib.Path:
  """What `write_file` writes first; a process that is killed may leave it."""
  return path.with_name(path.name + ".tmp")


def write_file(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file, at once or not at all, also where the power fails.

  Args:
    path: of the file; one that is there is replaced.
    content: of it; text as UTF-8.

  Raises:
    OSError: with the path; the old file is then as it was.
  """
  data = content.encode() if isinstance(content, str) else content
  temporary = temporary_of(path)
  with naming(temporary):
    temporary.write_bytes(data)
    flush(temporary)
  os.replace(temporary, path)


def flush(path: pathlib.Path) -> None:
  """Returns when what a file holds has reached the disk."""
  with path.open("rb") as file:
    os.fsync(file.fileno())


def try_lock(file: IO[Any]) -> bool:
  """Locks an open file for this process; False if another one has it.

  A lock ends with its process, however that ends. True, too, where the file
  system knows no locks.
  """
  import fcntl

  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise
  return True


@contextlib.contextmanager
def one_at_a_time(
  lock: pathlib.Path, waits: Callable[[], None]
) -> Iterator[None]:
  """Lets one process after the other into the block; see `try_lock`.

  Whoever comes in must look whether there is still something to do.

  Args:
    lock: a file for it, which goes when a process leaves.
    waits: is called if another process is in the block.
  """
  import fcntl

  while True:
    with lock.open("a") as file:
      if not try_lock(file):
        waits()
        fcntl.flock(file, fcntl.LOCK_EX)
      if not _is_file_at(lock, file):
        continue  # Whoever left took it away, and another may have made it.
      try:
        yield
      finally:
        lock.unlink(missing_ok=True)
      return


def _is_file_at(path: pathlib.Path, file: IO[Any]) -> bool:
  try:
    return os.path.samestat(os.fstat(file.fileno()), path.stat())
  except FileNotFoundError:
    return False


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
  """Adds the path to an OSError of the block that names none: a full disk."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      raise OSError(error.errno, error.strerror, str(path)) from None
    raise


def digest_of(values: Any) -> str:
  """sha256 (hex) of plain values, as JSON writes them."""
  return hashlib.sha256(json.dumps(values).encode()).hexdigest()
