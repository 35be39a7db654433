"""What all commands share: options, help, errors without traceback."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import sys
import textwrap
from typing import Annotated, ClassVar, NoReturn, Protocol

import tyro

from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study
from deltajax.config import ConfigError, RunConfig
from deltajax.files import write_file
from deltajax.routing.validation import check_name
from deltajax.routing.variants import VARIANTS
from deltajax.training.load import find_model
from deltajax.training.stopping import (
  INTERRUPTED,
  RUN_ERROR,
  RunStopped,
  USAGE_ERROR,
)
from train.config_files import load_config, load_typed, overview
from train.options import about_of, COLUMNS, parse_options, usage_lines


class Subcommand(Protocol):
  """A dataclass of options that knows what to do with them.

  Attributes:
    usage: what is given to it.
  """

  usage: ClassVar[str]

  def run(self) -> None:
    """Does it."""


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
class StudyRun:
  """Where a study runs.

  Attributes:
    out: directory of the study; the same command goes on with it.
    seeds: of the comparison, in place of the study's own: fewer, to report on
      those that are done.
    exclude_failed: leave runs that died out of the tables.
    document: a file that the tables are written into.
  """

  out: pathlib.Path
  seeds: tuple[int, ...] = ()
  exclude_failed: bool = False
  document: pathlib.Path | None = None


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


def parse_run(command: str, arguments: Sequence[str], about: str | None) -> Run:
  """Parses `CONFIG --workdir DIR [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
    about: the docstring that heads the help.
  """
  usage = f"{command} CONFIG  [--workdir DIR] [--training.steps N ...]"
  path, rest = _config_first(usage, "RunConfig", arguments, about)
  default = Run(load_config(path), _in_runs(path))
  return parse_options(
    *(Run, usage.replace("CONFIG", path), rest),
    about=_listing(about, "Variants (--model.routing.variant)", VARIANTS),
    default=default,
  )


def parse_finetune(
  command: str, arguments: Sequence[str], about: str | None
) -> Run:
  """Parses `CONFIG --init-from MODEL --workdir DIR [--field value ...]`.

  The defaults of all other options are made for the model.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
    about: the docstring that heads the help.
  """
  usage = (
    f"{command} CONFIG --init-from RUN_OR_DIR  [--workdir DIR] [--field N ...]"
  )
  path, rest = _config_first(usage, "RunConfig of a model", arguments, about)
  init_from = _value_of("--init-from", rest)
  if init_from is None and {"--help", "-h"} & set(rest):
    usage = usage.replace("CONFIG", path)
    how = _how_to_list(usage, "for that model.")
    _print_usage(usage, about, [how], ["--help"])
  if init_from is None:
    raise ConfigError(
      "--init-from is missing: name a model directory, a run, or one of its"
      " checkpoints."
    )
  config = load_config(path, find_model(pathlib.Path(init_from)))
  config = dataclasses.replace(config, init_from=init_from)
  return parse_options(
    *(Run, usage.replace("CONFIG", path), rest),
    about=about_of(about),
    default=Run(config, _in_runs(path)),
  )


def parse_compare(
  command: str, arguments: Sequence[str], about: str | None
) -> tuple[Comparison, CompareRun]:
  """Parses `CONFIG --out DIR [--arms A B] [--seeds 0 1] [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
    about: the docstring that heads the help.

  Returns:
    The comparison, with what was asked of it, and the options.
  """
  usage = (
    f"{command} CONFIG  [--out DIR] [--seeds 0 1] [--training.steps N ...]"
  )
  path, rest = _config_first(usage, "Comparison", arguments, about)
  comparison = load_typed(path, Comparison)
  options = parse_options(
    *(CompareRun, usage.replace("CONFIG", path), rest),
    about=_listing(about, "Arms (--arms)", comparison.arms),
    default=CompareRun(comparison.base, _in_runs(path)),
  )
  comparison = dataclasses.replace(comparison, base=options.config)
  return comparison.narrowed(options.arms, options.seeds), options


def parse_study(
  command: str, arguments: Sequence[str], about: str | None
) -> tuple[Study, StudyRun]:
  """Parses `CONFIG --out DIR [--seeds 0 1] [--document FILE]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
    about: the docstring that heads the help.

  Returns:
    The study, with what was asked of it, and the options.
  """
  usage = f"{command} CONFIG  [--out DIR] [--seeds 0 1] [--document FILE]"
  path, rest = _config_first(usage, "Study", arguments, about)
  study = load_typed(path, Study)
  options = parse_options(
    *(StudyRun, usage.replace("CONFIG", path), rest),
    about=about_of(about),
    default=StudyRun(_in_runs(path)),
  )
  return study.narrowed(options.seeds), options


def parse_ahead(
  command: str, arguments: Sequence[str], about: str | None
) -> AheadRun:
  """Parses `CONFIG --topology NAME [--json FILE] [--field value ...]`.

  Args:
    command: how the command is started, for its help.
    arguments: of the command line.
    about: the docstring that heads the help.
  """
  usage = (
    f"{command} CONFIG  --topology v5p:4x4x4 [--json FILE] [--field N ...]"
  )
  path, rest = _config_first(usage, "RunConfig", arguments, about)
  name = pathlib.Path(path).stem
  return parse_options(
    *(AheadRun, usage.replace("CONFIG", path), rest),
    about=about_of(about),
    default=AheadRun(load_config(path), tyro.MISSING, name=name),
  )


def parse_subcommand(
  command: str,
  subcommands: Mapping[str, type[Subcommand]],
  arguments: Sequence[str],
  about: str | None,
) -> Subcommand:
  """Parses `SUBCOMMAND ... [--field value ...]`; returns an instance.

  Args:
    command: how the command is started, for its help.
    subcommands: name -> dataclass whose docstring says what it does.
    arguments: of the command line.
    about: the docstring that heads the help.
  """
  if not arguments or arguments[0].startswith("-"):
    lines = [
      f"  {name:<9}{about_of(kind.__doc__).splitlines()[0]}"
      for name, kind in subcommands.items()
    ]
    lines.append(f"\n`{command} {next(iter(subcommands))} --help` and so on")
    usage = f"{command}  {{{','.join(subcommands)}}} ..."
    _print_usage(usage, about, lines, arguments)
  name, *rest = arguments
  check_name("subcommand", name, subcommands)
  kind = subcommands[name]
  return parse_options(
    *(kind, f"{command} {name}  {kind.usage}", rest),
    about=about_of(kind.__doc__),
  )


def _listing(about: str | None, what: str, names: Iterable[str]) -> str:
  """A docstring, and a paragraph with the names that an option takes."""
  names = textwrap.fill(f"{what}: {', '.join(names)}.", COLUMNS)
  return f"{about_of(about)}\n\n{names}"


def _in_runs(path: str) -> pathlib.Path:
  return pathlib.Path("runs") / pathlib.Path(path).stem


def _config_first(
  usage: str, kind: str, arguments: Sequence[str], about: str | None
) -> tuple[str, Sequence[str]]:
  """The path of a config, which comes first, and the options after it."""
  if not arguments or arguments[0].startswith("-"):
    lines = [_how_to_list(usage, "of a config:"), "", *overview(kind)]
    _print_usage(usage, about, lines, arguments)
  path, *rest = arguments
  return path, rest


def _how_to_list(usage: str, which: str) -> str:
  """Lines that say which command lists all options."""
  command, _ = usage.split("  ")
  return textwrap.fill(
    f"`{command} --help` lists all options {which}",
    COLUMNS,
    break_on_hyphens=False,
  )


def _print_usage(
  usage: str,
  about: str | None,
  lines: Sequence[str],
  arguments: Sequence[str],
) -> NoReturn:
  """Prints how a command is started; ends with 0 if that was asked for."""
  asked = arguments[:1] in (["--help"], ["-h"])
  text = "\n".join([usage_lines(usage), "", about_of(about), "", *lines])
  print(text, file=sys.stdout if asked else sys.stderr)
  raise SystemExit(0 if asked else USAGE_ERROR)


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
  """The value of an option, before the others can be parsed."""
  for i, argument in enumerate(arguments):
    name, equals, value = argument.partition("=")
    if name.replace("_", "-") == option:
      return value if equals else next(iter(arguments[i + 1 :]), None)
  return None


def check_counts(**counts: int | None) -> None:
  """Raises ConfigError for an option that counts something and is below 1."""
  for name, value in counts.items():
    if value is not None and value < 1:
      option = "--" + name.replace("_", "-")
      raise ConfigError(f"{option} is {value}; it must be at least 1.")


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


def write_json_file(file: pathlib.Path | None, value: object) -> None:
  """Writes a JSON file, if one is asked for, at once or not at all."""
  if file is not None:
    write_file(file, json.dumps(value, indent=2) + "\n")


def main(command: Callable[[list[str]], None], *, resumes: bool = True) -> None:
  """Runs a command; user errors are one message and an exit code.

  Args:
    command: is given the arguments of the command line.
    resumes: whether it goes on where it was interrupted.
  """
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
    more = "; the same command goes on" if resumes else ""
    print(f"interrupted{more}", file=sys.stderr)
    raise SystemExit(INTERRUPTED) from None
