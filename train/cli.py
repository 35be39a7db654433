"""What all commands share: config files, options, errors without traceback."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import inspect
import json
import pathlib
import sys
from typing import Annotated, Any, TypeVar

import tyro

from deltajax.comparison.plan import Comparison
from deltajax.config import ConfigError, RunConfig
from deltajax.files import write_file
from deltajax.routing.validation import check_name, unknown_name
from deltajax.training.load import find_model, StoredModel
from deltajax.training.stopping import (
  INTERRUPTED,
  RUN_ERROR,
  RunStopped,
  USAGE_ERROR,
)

T = TypeVar("T")


def load_config(path: str, base: StoredModel | None = None) -> RunConfig:
  """Calls `get_config` of a Python file.

  Args:
    path: of the file.
    base: a model; `get_config(base)` is a recipe for fine-tuning any, and
      `get_config()` the config of a run.

  Raises:
    ConfigError: if there is no such file, or it defines no such function.
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
  config = get_config(base) if takes_base else get_config()
  return _checked(path, config, RunConfig)


def load_typed(path: str, kind: type[T]) -> T:
  """Calls `get_config` of a Python file that returns this type.

  Raises:
    ConfigError: if there is no such file, or it returns anything else.
  """
  get_config = _get_config(path)
  if inspect.signature(get_config).parameters:
    raise ConfigError(
      f"get_config() of {path} takes a model to start with, and returns no"
      f" {kind.__name__}."
    )
  return _checked(path, get_config(), kind)


def _get_config(path: str) -> Callable[..., Any]:
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
  get_config: Callable[..., Any] = module.get_config
  return get_config


def _checked(path: str, config: Any, kind: type[T]) -> T:
  if not isinstance(config, kind):
    raise ConfigError(
      f"get_config() of {path} returns {type(config).__name__}, not"
      f" {kind.__name__}."
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


@dataclasses.dataclass(frozen=True)
class CompareRun:
  """A comparison and what to do with it.

  Attributes:
    config: that all arms share; every field is an option, for example
      --training.steps.
    out: directory of the comparison; the same command goes on with it.
    arms: which; none: all.
    seeds: in place of the comparison's own.
    report_only: train nothing, and report on runs that are done.
    exclude_failed: leave runs that died out of the report.
  """

  config: Annotated[RunConfig, tyro.conf.arg(name="")]
  out: pathlib.Path
  arms: tuple[str, ...] = ()
  seeds: tuple[int, ...] = ()
  report_only: bool = False
  exclude_failed: bool = False


@dataclasses.dataclass(frozen=True)
class AheadRun:
  """A config and what to compile it for.

  Attributes:
    config: every field is an option, for example --training.batch-size.
    topology: v5p:4x4x4, 2*v5e:4x4 (two slices), cpu:8 or gpu:8.
    json: also write the report to this file.
    name: of the config.
  """

  config: Annotated[RunConfig, tyro.conf.arg(name="")]
  topology: str
  json: pathlib.Path | None = None
  name: tyro.conf.Suppress[str] = ""


def parse_run(command: str, arguments: Sequence[str]) -> Run:
  """Parses `CONFIG --workdir DIR [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
  """
  return _parse(
    f"{command} CONFIG --workdir DIR [--training.steps N ...]",
    arguments,
    lambda config, name: Run(config, pathlib.Path("runs") / name),
  )


def parse_finetune(command: str, arguments: Sequence[str]) -> Run:
  """Parses `CONFIG --init-from MODEL --workdir DIR [--field value ...]`.

  The defaults of all other options are made for the model.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
  """
  usage = f"{command} CONFIG --init-from RUN_OR_DIR --workdir DIR [--field N]"
  path, rest = _config_first(usage, arguments)
  init_from = _value_of("--init-from", rest)
  if init_from is None:
    raise ConfigError(
      "--init-from is missing: name a model directory, a run, or one of its"
      " checkpoints."
    )
  config = load_config(path, find_model(pathlib.Path(init_from)))
  config = dataclasses.replace(config, init_from=init_from)
  default = Run(config, pathlib.Path("runs") / pathlib.Path(path).stem)
  return _parse_over(default, f"{command} {path}", rest)


def parse_compare(
  command: str, arguments: Sequence[str]
) -> tuple[Comparison, CompareRun]:
  """Parses `CONFIG --out DIR [--arms A B] [--seeds 0 1] [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.

  Returns:
    The comparison, with what was asked of it, and the options.
  """
  usage = f"{command} CONFIG --out DIR [--seeds 0 1] [--training.steps N ...]"
  path, rest = _config_first(usage, arguments)
  comparison = load_typed(path, Comparison)
  default = CompareRun(
    comparison.base, pathlib.Path("runs") / pathlib.Path(path).stem
  )
  options = _parse_over(default, f"{command} {path}", rest)
  comparison = dataclasses.replace(comparison, base=options.config)
  return comparison.narrowed(options.arms, options.seeds), options


def parse_ahead(command: str, arguments: Sequence[str]) -> AheadRun:
  """Parses `CONFIG --topology NAME [--json FILE] [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
  """
  return _parse(
    f"{command} CONFIG --topology v5p:4x4x4 [--json FILE] [--field N ...]",
    arguments,
    lambda config, name: AheadRun(config, tyro.MISSING, name=name),
  )


def parse_subcommand(
  command: str, subcommands: Mapping[str, type], arguments: Sequence[str]
) -> Any:
  """Parses `SUBCOMMAND ... [--field value ...]`; returns an instance.

  Args:
    command: how the command is started, for its help.
    subcommands: name -> dataclass whose docstring says what it does.
    arguments: of the command line.
  """
  if not arguments or arguments[0].startswith("-"):
    print(f"usage: {command} {{{','.join(subcommands)}}} ...")
    for name, kind in subcommands.items():
      print(f"  {name:<9}{(kind.__doc__ or '').splitlines()[0]}")
    asked = arguments[:1] in (["--help"], ["-h"])
    raise SystemExit(0 if asked else USAGE_ERROR)
  name, *rest = arguments
  check_name("subcommand", name, subcommands)
  _check_named_once(rest)
  return tyro.cli(subcommands[name], prog=f"{command} {name}", args=rest)


def _parse(
  usage: str,
  arguments: Sequence[str],
  make_default: Callable[[RunConfig, str], T],
) -> T:
  """Loads the config that comes first, and parses options over it."""
  path, rest = _config_first(usage, arguments)
  default = make_default(load_config(path), pathlib.Path(path).stem)
  return _parse_over(default, f"{_command(usage)} {path}", rest)


def _parse_over(default: T, command: str, arguments: Sequence[str]) -> T:
  return tyro.cli(type(default), prog=command, default=default, args=arguments)


def _command(usage: str) -> str:
  return usage.split(" CONFIG ")[0]


def _config_first(
  usage: str, arguments: Sequence[str]
) -> tuple[str, Sequence[str]]:
  """The path of a config, which comes first, and the options after it."""
  command = _command(usage)
  if not arguments or arguments[0].startswith("-"):
    print(f"usage: {usage}")
    print(f"`{command} CONFIG --help` lists every option of a config file:")
    print("  " + "\n  ".join(config_files()))
    asked = arguments[:1] in (["--help"], ["-h"])
    raise SystemExit(0 if asked else USAGE_ERROR)
  path, *rest = arguments
  _check_named_once(rest)
  return path, rest


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
  """The value of an option, before the others can be parsed."""
  for i, argument in enumerate(arguments):
    name, equals, value = argument.partition("=")
    if name.replace("_", "-") == option:
      return value if equals else next(iter(arguments[i + 1 :]), None)
  return None


def _check_named_once(arguments: Sequence[str]) -> None:
  """Raises ConfigError if an option is given twice: one would be ignored."""
  seen: set[str] = set()
  for argument in arguments:
    if not argument.startswith("--"):
      continue
    name = argument.split("=")[0].replace("_", "-")
    if name in seen:
      raise ConfigError(f"{name} is given twice; give it once.")
    seen.add(name)


def check_json_file(file: pathlib.Path | None, option: str = "--json") -> None:
  """Raises ConfigError unless a file that an option names could be written."""
  if file is None:
    return
  if not file.absolute().parent.is_dir():
    raise ConfigError(
      f"{option} {file}: there is no directory {file.absolute().parent}."
    )
  if file.is_dir():
    raise ConfigError(f"{option} {file} is a directory; name a file.")


def write_json_file(file: pathlib.Path | None, value: Any) -> None:
  """Writes a JSON file, if one is asked for, at once or not at all."""
  if file is not None:
    write_file(file, json.dumps(value, indent=2) + "\n")


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
  except RunStopped as error:
    print(f"stopped: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None
  except OSError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(RUN_ERROR) from None
  except KeyboardInterrupt:
    print("interrupted; the same command goes on", file=sys.stderr)
    raise SystemExit(INTERRUPTED) from None
