"""How to install what an extra of the package brings."""

import pathlib

_BESIDE_THE_PACKAGE = pathlib.Path(__file__).parents[1] / "pyproject.toml"


def install(extra: str) -> str:
  """The command that adds an extra to this installation, for messages.

  An installed package is found by its name, a copy of the repository, which may
  be of no release, by its place.

  Args:
    extra: of pyproject.toml, for example `train`.
  """
  if _BESIDE_THE_PACKAGE.exists():
    return f"pip install '.[{extra}]' in the copy of the repository"
  return f"pip install 'deltajax[{extra}]'"
