"""Commands, run from the repository root: python -m train.pretrain ...

What they lack is told in one message too: they import it before they run.
"""

import sys
from types import TracebackType

from deltajax.extras import install
from deltajax.training.stopping import USAGE_ERROR

# Packages that are imported at the head of modules, all of the extra `train`.
_OF_TRAIN = ("array_record", "grain", "orbax", "tensorflow_datasets")


def _tell(
  kind: type[BaseException],
  error: BaseException,
  trace: TracebackType | None,
) -> None:
  """Shows what ends a process; a missing extra as the command to install it."""
  missing = (getattr(error, "name", None) or "").partition(".")[0]
  if kind is not ModuleNotFoundError or missing not in _OF_TRAIN:
    sys.__excepthook__(kind, error, trace)
    return
  print(
    f"error: this command needs {missing}: {install('train')}.",
    file=sys.stderr,
  )
  raise SystemExit(USAGE_ERROR)


sys.excepthook = _tell
