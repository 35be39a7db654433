"""Pallas kernels behind `deltajax.routing`; they import nothing of the rest."""

from collections.abc import Callable
import functools
from typing import Any

import jax

# The logit of a source that is not seen. Finite: no NaN where nothing is.
MASKED = -1e30


def without_x64(function: Callable[..., Any]) -> Callable[..., Any]:
  """Traces a kernel with 32-bit constants, whatever the caller has enabled.

  Kernels compute in float32; the compilers for them know no other.
  """

  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    with jax.enable_x64(False):
      return function(*args, **kwargs)

  return wrapped
