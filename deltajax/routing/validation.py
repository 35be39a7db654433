"""Typed, validated options: the base of every configuration in the project.

`@typed_config` makes a frozen, keyword-only dataclass whose constructor names
the nearest valid field when it is given an unknown one. `ConfigError` is the
one error type for options that cannot be used.
"""

from collections.abc import Iterable
import dataclasses
import difflib
import functools
import math
import numbers
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
  """An option has a value that cannot be used; the message says what would.

  Every public function raises it before any work; commands print the message
  and exit with code 2.

  Examples:
    >>> import deltajax
    >>> try:
    ...   deltajax.RoutingConfig(num_blocks=0)
    ... except deltajax.ConfigError as error:
    ...   print(error)
    routing.num_blocks is 0; it must be at least 1.
  """


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
  """Returns a message that names the valid names nearest to `name`.

  Args:
    kind: what the name stands for, for example "variant".
    name: the value that was given.
    valid: every name that would have been accepted.
  """
  names = sorted(valid)
  nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
  hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
  return f"unknown {kind} {name!r}{hint} Valid: {', '.join(names)}."


def check_name(kind: str, name: object, valid: Iterable[str]) -> None:
  """Raises ConfigError unless `name` is one of `valid`."""
  names = list(valid)
  if name not in names:
    raise ConfigError(unknown_name(kind, name, names))


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def typed_config(cls: type[T]) -> type[T]:
  """Class decorator: a frozen, keyword-only dataclass with helpful errors."""
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  fields = dataclasses.fields(cls)  # type: ignore[arg-type]
  names = [f.name for f in fields]
  needed = [
    f.name
    for f in fields
    if f.default is f.default_factory is dataclasses.MISSING
  ]
  plain_init = cls.__init__

  @functools.wraps(plain_init)
  def init(self: Any, *args: Any, **kwargs: Any) -> None:
    hints = typing.get_type_hints(cls)
    for name, value in kwargs.items():
      check_name(f"{cls.__name__} field", name, names)
      if not _is_a(value, hints[name]):
        expected = getattr(hints[name], "__name__", str(hints[name]))
        raise ConfigError(
          f"{cls.__name__}.{name} is {value!r}; it must be a finite {expected}."
          if expected == "float"
          else f"{cls.__name__}.{name} is {value!r}; it must be {expected}."
        )
    missing = [name for name in needed if name not in kwargs]
    if missing and not args:
      raise ConfigError(f"{cls.__name__} lacks {', '.join(missing)}.")
    plain_init(self, *args, **kwargs)

  setattr(cls, "__init__", init)  # noqa: B010
  return cls


def _is_a(value: Any, hint: Any) -> bool:
  """Whether a value is of an annotated type, as options understand it."""
  choices = typing.get_args(hint)
  if typing.get_origin(hint) is tuple:  # tuple[A, ...]
    return isinstance(value, tuple) and all(_is_a(x, choices[0]) for x in value)
  if choices:  # A | None
    return any(_is_a(value, choice) for choice in choices)
  if isinstance(value, bool) or hint is bool:
    return isinstance(value, bool) and hint is bool
  if hint is float:
    return isinstance(value, numbers.Real) and math.isfinite(value)
  if hint is int:
    return isinstance(value, numbers.Integral)
  return isinstance(value, hint)
