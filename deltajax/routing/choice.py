"""Which of several implementations serves a case, and why not the others."""

from collections.abc import Callable, Iterable, Mapping
import functools
import importlib.util
import logging
import re
from typing import Any, NamedTuple, Protocol

from deltajax.routing.sharding import traced_platform
from deltajax.routing.validation import check_name, ConfigError


class Implementation(Protocol):
  """What `choose` needs to know of an implementation."""

  @property
  def refusal(self) -> Callable[[Any], str | None]:
    """Says why a case is not supported, or None."""

  @property
  def platform(self) -> str | None:
    """The only one that it runs on; None for any."""


class Choice(NamedTuple):
  """An implementation, and why those before it in the order do not serve.

  Attributes:
    name: of the implementation.
    rejected: name -> reason.
  """

  name: str
  rejected: dict[str, str]

  def __str__(self) -> str:
    """For the console: the name, and in brackets the others' reasons."""
    reasons = "; ".join(
      f"not {name}: {reason}" for name, reason in self.rejected.items()
    )
    return self.name + (f" ({reasons})" if reasons else "")


def choose(
  what: str,
  case: Any,
  implementations: Mapping[str, Implementation],
  automatic: Iterable[str],
  name: str | None = None,
  platform: str | None = None,
) -> Choice:
  """Returns the implementation that serves a case.

  A name is refused on a platform that it does not run on.

  Args:
    what: is implemented, for messages.
    case: what is computed.
    implementations: by name.
    automatic: names in the order in which they are tried.
    name: of the only one that may serve; None for the first that does.
    platform: `cpu`, `gpu` or `tpu`; None for `sharding.traced_platform`.

  Raises:
    ConfigError: if a name is unknown or cannot serve.
  """
  platform = platform or traced_platform()
  if name is not None:
    check_name(f"{what} implementation", name, implementations)
    reason = _refusal(implementations[name], case, platform)
    if reason is not None:
      raise ConfigError(f"{what} {name!r} cannot serve: {reason}.")
    return Choice(name, {})
  rejected: dict[str, str] = {}
  for candidate in automatic:
    reason = _refusal(implementations[candidate], case, platform)
    if reason is None:
      choice = Choice(candidate, rejected)
      _log_once(f"{what}: {choice}")
      return choice
    rejected[candidate] = reason
  raise ConfigError(f"no {what} implementation serves {case}: {rejected}.")


def has_cuda_plugin() -> bool:
  """Whether JAX's part for NVIDIA GPUs is installed, with or without one."""
  plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jaxlib.cuda")
  return any(importlib.util.find_spec(name) is not None for name in plugins)


def compute_capability(device: Any) -> str | None:
  """Of a GPU, such as "8.0", or "gfx942" of AMD's; None for other devices."""
  return getattr(device, "compute_capability", None)


def gpu_refusal(capability: str | None) -> str | None:
  """Why a GPU is none of NVIDIA's from Ampere on; None if it is.

  Args:
    capability: of the GPU, such as `8.0`, or `gfx942` of AMD's; None where not
      known, ahead of time.
  """
  if capability is None:
    return None
  if re.fullmatch(r"\d+\.\d+", capability) is None:
    return f"it needs an NVIDIA GPU, this one is {capability}"
  if float(capability) < 8:
    return f"it needs compute capability 8.0, this GPU has {capability}"
  return None


@functools.cache
def _log_once(line: str) -> None:
  logging.getLogger(__name__).info(line)


def _refusal(
  implementation: Implementation, case: Any, platform: str
) -> str | None:
  needed = implementation.platform
  if needed not in (None, platform):
    return f"it runs on {needed}, the platform is {platform}"
  return implementation.refusal(case)
