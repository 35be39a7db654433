"""What all commands share: config files, options, errors without traceback."""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import pathlib
import sys
from typing import Annotated

import tyro

from deltajax.config import ConfigError, RunConfig
from deltajax.routing.validation import unknown_name
from deltajax.training.loop import NonFiniteError

USAGE_ERROR = 2
RUN_ERROR = 1


def load_config(path: str) -> RunConfig:
  """Calls `get_config()` of a Python file.

  Raises:
    ConfigError: if there is no such file, or it defines no such function.
  """
  file = pathlib.Path(path)
  if not file.is_file() or file.suffix != ".py":
    raise ConfigError(
      unknown_name("config file", path, config_files() or ["none here"])
    )
  spec = importlib.util.spec_from_file_location(file.stem, file)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"{path} defines no get_config().")
  config = module.get_config()
  if not isinstance(config, RunConfig):
    raise ConfigError(
      f"get_config() of {path} returns {type(config).__name__}, not RunConfig."
    )
  return config


@dataclasses.dataclass(frozen=True)
class Run:
  """A config and where it runs.

  Attributes:
    config: every field is an option, for example --training.steps.
    workdir: directory of the run; the same command resumes it.
  """

  config: Annotated[RunConfig, tyro.conf.arg(name="")]
  workdir: pathlib.Path


def parse_run(command: str, arguments: Sequence[str]) -> Run:
  """Parses `CONFIG --workdir DIR [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
  """
  if not arguments or arguments[0].startswith("-"):
    print(f"usage: {command} CONFIG --workdir DIR [--training.steps N ...]")
    print(f"`{command} CONFIG --help` lists every option of a config file:")
    print("  " + "\n  ".join(config_files()))
    asked = arguments[:1] in (["--help"], ["-h"])
    raise SystemExit(0 if asked else USAGE_ERROR)
  path, *rest = arguments
  config = load_config(path)
  workdir = pathlib.Path("runs") / pathlib.Path(path).stem
  return tyro.cli(
    Run,
    prog=f"{command} {path}",
    default=Run(config=config, workdir=workdir),
    args=rest,
  )


def config_files() -> list[str]:
  """The config files of the repository."""
  return sorted(str(path) for path in pathlib.Path("configs").glob("*.py"))


def main(command: Callable[[list[str]], None]) -> None:
  """Runs a command; user errors are one message and an exit code."""
  try:
    command(sys.argv[1:])
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR) from None
  except NonFiniteError as error:
    print(f"stopped: {error}", file=sys.stderr)
    raise SystemExit(RUN_ERROR) from None
  except OSError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(RUN_ERROR) from None
  except KeyboardInterrupt:
    print("interrupted; the same command resumes the run", file=sys.stderr)
    raise SystemExit(RUN_ERROR) from None
