"""Which dtypes JAX computes in here."""

import jax

from deltajax.config import ConfigError, ModelConfig


def dtype_here(given: str | None) -> str | None:
  """A dtype that was given, else float32 on a CPU, which has no fast bfloat16.

  None elsewhere: models compute in their own.
  """
  if given is None and jax.default_backend() == "cpu":
    return "float32"
  return given


def check_dtypes(config: ModelConfig) -> None:
  """Checks both dtypes of a model that is trained; see `check_dtype`."""
  check_dtype(config.dtype, "model.dtype")
  check_dtype(config.param_dtype, "model.param_dtype")


def check_dtype(dtype: str, name: str = "dtype") -> None:
  """Raises ConfigError for float64 where JAX would quietly take float32.

  Args:
    dtype: of a model.
    name: of the option that says so.
  """
  if jax.dtypes.canonicalize_dtype(dtype) != jax.numpy.dtype(dtype):
    raise ConfigError(
      f"{name} is {dtype}, but JAX would compute in float32; set"
      " JAX_ENABLE_X64=1, or take float32."
    )
