"""Python files that hold configs: one is loaded, or those here are listed."""

import ast
from collections.abc import Callable
import importlib.util
import inspect
import pathlib
import textwrap
import traceback
from typing import Any, TypeVar

from deltajax.config import ConfigError, RunConfig
from deltajax.routing.validation import unknown_name
from deltajax.training.load import StoredModel
from train.options import COLUMNS

T = TypeVar("T")

# What takes a config: whatever get_config() returns, or of a model.
COMMANDS = {
  "RunConfig": "train.pretrain",
  "RunConfig of a model": "train.finetune",
  "Comparison": "train.compare",
  "Study": "train.study",
}


def load_config(path: str, base: StoredModel | None = None) -> RunConfig:
  """Calls `get_config` of a Python file.

  Args:
    path: of the file.
    base: a model; `get_config(base)` is a recipe for fine-tuning any, and
      `get_config()` the config of a run.

  Raises:
    ConfigError: if there is no such file, it cannot be run, or it defines no
      such function.
  """
  get_config = _get_config(path)
  takes_base = bool(inspect.signature(get_config).parameters)
  if takes_base and base is None:
    raise ConfigError(
      f"get_config() of {path} takes a model to start with: it is for python -m"
      " train.finetune."
    )
  if base is not None and not takes_base:
    raise ConfigError(
      f"get_config() of {path} takes no model to start with; fine-tuning needs"
      " one like that of configs/finetune_smollm2.py."
    )
  arguments = (base,) if takes_base else ()
  return _checked(path, _run(path, get_config, *arguments), RunConfig)


def load_typed(path: str, kind: type[T]) -> T:
  """Calls `get_config` of a Python file that returns this type.

  Raises:
    ConfigError: if there is no such file, it cannot be run, or it returns
      anything else.
  """
  get_config = _get_config(path)
  if inspect.signature(get_config).parameters:
    raise ConfigError(
      f"get_config() of {path} takes a model to start with, and returns no"
      f" {kind.__name__}: it is for python -m train.finetune."
    )
  return _checked(path, _run(path, get_config), kind)


def overview(kind: str) -> list[str]:
  """Lines that list the config files of the repository for a command.

  Args:
    kind: what `get_config` returns, as in `COMMANDS`.
  """
  found = {
    str(path): about
    for path in sorted(pathlib.Path("configs").glob("*.py"))
    for found, about in [_described(path)]
    if found == kind
  }
  if not found:
    return ["  none here: run it where `configs` is, or name a file of yours"]
  width = 4 + max(map(len, found))
  return [
    line
    for path, about in found.items()
    for line in textwrap.wrap(
      f"  {path:<{width - 2}}{about}",
      COLUMNS,
      subsequent_indent=" " * width,
      break_on_hyphens=False,
    )
  ]


def config_files() -> list[str]:
  """The config files of the repository."""
  return sorted(str(path) for path in pathlib.Path("configs").glob("*.py"))


def _described(path: pathlib.Path) -> tuple[str, str]:
  """What a file's get_config() returns, and the first line about it."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  kind = ""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == "get_config":
      kind = ast.unparse(node.returns) if node.returns else ""
      kind += " of a model" if node.args.args else ""
  return kind, (ast.get_docstring(tree) or "").partition("\n")[0]


def _get_config(path: str) -> Callable[..., Any]:
  file = pathlib.Path(path)
  if file.is_file() and file.suffix != ".py":
    raise ConfigError(
      f"{path} is no Python file; a config is one, like configs/quickstart.py."
    )
  if not file.is_file():
    raise ConfigError(
      unknown_name("config file", path, config_files() or ["none here"])
    )
  spec = importlib.util.spec_from_file_location(file.stem, file)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  _run(path, spec.loader.exec_module, module)
  if not hasattr(module, "get_config"):
    raise ConfigError(
      f"{path} defines no get_config(); see configs/quickstart.py for one."
    )
  get_config: Callable[..., Any] = module.get_config
  return get_config


def _run(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls what a config file defines; says where in the file it goes wrong."""
  try:
    return function(*arguments)
  except (ConfigError, OSError):
    raise
  except Exception as error:
    lines = [
      frame.lineno
      for frame in traceback.extract_tb(error.__traceback__)
      if pathlib.Path(frame.filename).resolve() == pathlib.Path(path).resolve()
    ]
    line = error.lineno if isinstance(error, SyntaxError) else None
    line = line or (lines[-1] if lines else 1)
    message = error.msg if isinstance(error, SyntaxError) else error
    raise ConfigError(
      f"{path}, line {line}: {type(error).__name__}: {message}"
    ) from error


def _checked(path: str, config: Any, kind: type[T]) -> T:
  if not isinstance(config, kind):
    name = type(config).__name__
    command = COMMANDS.get(name)
    raise ConfigError(
      f"get_config() of {path} returns {name}, not {kind.__name__}"
      + (f": it is for python -m {command}." if command else ".")
    )
  return config
