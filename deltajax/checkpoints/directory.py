"""Directories that are written at once or not at all."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
import shutil
import tempfile

from deltajax.config import ConfigError


def check_replaceable(
  target: pathlib.Path, may_replace: Callable[[pathlib.Path], bool]
) -> None:
  """Raises ConfigError if `replaced_directory` would."""
  if target.exists() and not target.is_dir():
    raise ConfigError(f"{target} is a file, not a directory.")
  kept = sorted(path.name for path in target.glob("*") if not may_replace(path))
  if kept:
    raise ConfigError(
      f"{target} holds {kept[0]!r}, which is no part of a model and would be"
      " lost; name an empty or new directory."
    )


@contextlib.contextmanager
def replaced_directory(
  target: pathlib.Path, may_replace: Callable[[pathlib.Path], bool]
) -> Iterator[pathlib.Path]:
  """A temporary directory that becomes `target` when all went well.

  If anything is raised inside of the context, `target` stays as it was.

  Args:
    target: a new directory, an empty one, or one whose files may be replaced.
    may_replace: whether a file in it may.

  Raises:
    ConfigError: if the target holds anything else, before anything is written.
  """
  check_replaceable(target, may_replace)
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
