"""Directories that are written at once or not at all."""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile

from deltajax.config import ConfigError


def check_replaceable(
  target: pathlib.Path,
  may_replace: Callable[[pathlib.Path], bool],
  what: str = "a model",
) -> None:
  """Raises ConfigError if `replaced_directory` would, or could not write."""
  if target.exists() and not target.is_dir():
    raise ConfigError(f"{target} is a file, not a directory.")
  kept = sorted(path.name for path in target.glob("*") if not may_replace(path))
  if kept:
    raise ConfigError(
      f"{target} holds {kept[0]!r}, which is no part of {what} and would be"
      " lost; name an empty or new directory."
    )
  parent = target.absolute().parent
  while not parent.exists():
    parent = parent.parent
  if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
    raise ConfigError(
      f"{target} cannot be written: {parent} is no directory that one may"
      " write to."
    )


@contextlib.contextmanager
def replaced_directory(
  target: pathlib.Path,
  may_replace: Callable[[pathlib.Path], bool],
  what: str = "a model",
) -> Iterator[pathlib.Path]:
  """A temporary directory that becomes `target` when all went well.

  If anything is raised inside of the context, `target` stays as it was.

  Args:
    target: a new directory, an empty one, or one whose files may be replaced.
    may_replace: whether a file in it may.
    what: which such files are part of, for messages.

  Raises:
    ConfigError: if the target holds anything else, or is somewhere that cannot
      be written to, before anything is written.
  """
  check_replaceable(target, may_replace, what)
  target = target.absolute()
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = pathlib.Path(
    tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
  )
  written, old = temporary / "new", temporary / "old"
  try:
    written.mkdir()
    yield written
    if target.exists():
      target.rename(old)
    try:
      written.rename(target)
    except BaseException:
      if old.exists():
        old.rename(target)
      raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
