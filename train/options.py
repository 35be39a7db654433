"""How options of a command are parsed, and how its help looks.

tyro makes options of dataclasses. Here they are shown shorter: what may be
None as `INT` and not `{None}|INT`, several values as `STR ...`; and what is no
number is told so.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import inspect
import io
import textwrap
import types
import typing
from typing import Any, TypeVar

import tyro
from tyro.constructors import (
  ConstructorRegistry,
  PrimitiveConstructorSpec,
  PrimitiveTypeInfo,
  UnsupportedTypeAnnotationError,
)

from deltajax.routing.validation import ConfigError

T = TypeVar("T")
Spec = PrimitiveConstructorSpec | UnsupportedTypeAnnotationError

_REGISTRY = ConstructorRegistry()
COLUMNS = 80
_NUMBERS = {int: "a whole number", float: "a number"}


def parse_options(
  kind: type[T],
  usage: str,
  arguments: Sequence[str],
  *,
  about: str,
  default: T | None = None,
  repeatable: Sequence[str] = (),
) -> T:
  """Parses options into a dataclass; ends with 2 and a message if they cannot.

  Args:
    kind: the dataclass, whose docstring describes the options.
    usage: how the command is started; options stand after two spaces.
    arguments: of the command line.
    about: heads the help.
    default: what options that are not given are taken from.
    repeatable: options that may be given more than once.

  Raises:
    ConfigError: if another one is.
    SystemExit: after help, which ends with 0, or a message.
  """
  known: dict[str, Any] = {} if default is None else {"default": default}
  parse = functools.partial(
    tyro.cli,
    kind,
    prog=usage.split("  ")[0],
    args=arguments,
    registry=_REGISTRY,
    **known,
  )
  if not {"-h", "--help"} & set(arguments):
    _check_given_once(arguments, repeatable)
    found: T = parse()
    return found
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    parse(description="")
  # Its usage names options without end, and it wraps what is laid out.
  described = printed.getvalue().partition("\n\n")[2]
  options = "\n".join(map(str.rstrip, described.splitlines()))
  print(usage_lines(usage), about, options, sep="\n\n")
  raise SystemExit(0)


def _check_given_once(
  arguments: Sequence[str], repeatable: Sequence[str]
) -> None:
  """Raises ConfigError if an option is given twice: one would be ignored."""
  seen: set[str] = set()
  for argument in arguments:
    if not argument.startswith("--"):
      continue
    name = argument.split("=")[0].replace("_", "-")
    if name in seen and name not in repeatable:
      raise ConfigError(f"{name} is given twice; give it once.")
    seen.add(name)


def usage_lines(usage: str) -> str:
  """How a command is started, in lines."""
  return textwrap.fill(
    f"usage: {usage.replace('  ', ' ')}",
    COLUMNS,
    subsequent_indent=" " * 7,
    break_long_words=False,
    break_on_hyphens=False,
  )


def about_of(docstring: str | None) -> str:
  """A docstring as it stands in a help: without indentation and attributes."""
  return inspect.cleandoc(docstring or "").split("\n\nAttributes:")[0]


def _spec_of(kind: Any, info: PrimitiveTypeInfo) -> Spec:
  return ConstructorRegistry.get_primitive_spec(
    PrimitiveTypeInfo.make(kind, info.markers)
  )


@_REGISTRY.primitive_rule
def _number(info: PrimitiveTypeInfo) -> Spec | None:
  """Says what a number that cannot be read should be."""
  kind = info.type
  if kind not in _NUMBERS:
    return None

  def read(values: list[str]) -> Any:
    try:
      return kind(*values)
    except ValueError:
      raise ValueError(f"{values[0]!r} is not {_NUMBERS[kind]}.") from None

  return PrimitiveConstructorSpec(
    nargs=1,
    metavar=kind.__name__.upper(),
    instance_from_str=read,
    # A float may be given as 1, but not as True.
    is_instance=lambda x: type(x) in (int, kind),
    str_from_instance=lambda x: [str(x)],
  )


@_REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> Spec | None:
  """Shows `A | None` as A; `None` can still be given."""
  kinds = typing.get_args(info.type)
  unions = (typing.Union, types.UnionType)
  if typing.get_origin(info.type) not in unions or types.NoneType not in kinds:
    return None
  inner = tuple(kind for kind in kinds if kind is not types.NoneType)
  spec = _spec_of(typing.Union[inner], info)  # noqa: UP007 (of a tuple)
  if isinstance(spec, UnsupportedTypeAnnotationError):
    return spec
  return PrimitiveConstructorSpec(
    nargs=spec.nargs,
    metavar=spec.metavar,
    instance_from_str=_unless_none(spec.instance_from_str),
    is_instance=lambda x: x is None or spec.is_instance(x),
    str_from_instance=lambda x: (
      ["None"] if x is None else spec.str_from_instance(x)
    ),
  )


def _unless_none(read: Callable[[list[str]], Any]) -> Callable[..., Any]:
  return lambda values: None if values == ["None"] else read(values)


@_REGISTRY.primitive_rule
def _several(info: PrimitiveTypeInfo) -> Spec | None:
  """Shows `tuple[A, ...]` as A ..., and an empty default as `none`."""
  if (
    typing.get_origin(info.type) is not tuple
    or typing.get_args(info.type)[1:] != (Ellipsis,)
    or tyro.conf.UseAppendAction in info.markers
  ):
    return None
  spec = _spec_of(typing.get_args(info.type)[0], info)
  if isinstance(spec, UnsupportedTypeAnnotationError):
    return spec
  return dataclasses.replace(
    spec,
    nargs="*",
    metavar=f"{spec.metavar} ...",
    instance_from_str=lambda xs: tuple(spec.instance_from_str([x]) for x in xs),
    is_instance=lambda xs: (
      isinstance(xs, tuple) and all(map(spec.is_instance, xs))
    ),
    str_from_instance=lambda xs: (
      [text for x in xs for text in spec.str_from_instance(x)] or ["none"]
    ),
  )
