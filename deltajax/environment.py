"""What a program runs on, for the first lines of a notebook."""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax

import deltajax
from deltajax.routing.choice import gpu_refusal


@dataclasses.dataclass(frozen=True)
class Environment:
  """Versions, devices, and what one should know about them.

  `print` shows it.

  Attributes:
    versions: of Python and packages, by name.
    devices: what computes, in words.
    platform: `cpu`, `gpu` or `tpu`.
    dtype: what models should compute in here: `bfloat16` where devices have
      it, else `float32`.
    warnings: what is probably not meant to be so.
  """

  versions: Mapping[str, str]
  devices: str
  platform: str
  dtype: str
  warnings: tuple[str, ...]

  def __str__(self) -> str:
    versions = ", ".join(f"{name} {x}" for name, x in self.versions.items())
    lines = [
      f"versions  {versions}",
      f"devices   {self.devices}",
      f"dtype     {self.dtype}, which these devices do well",
      *(f"WARNING   {text}" for text in self.warnings),
    ]
    return "\n".join(lines)


def environment(devices: Sequence[Any] | None = None) -> Environment:
  """Looks at what is installed, and at what JAX computes on.

  Args:
    devices: that would compute; None: all that JAX has, which starts it.

  Examples:
    >>> here = environment()
    >>> here.platform in ("cpu", "gpu", "tpu")
    True
  """
  devices = jax.devices() if devices is None else devices
  first = devices[0]
  return Environment(
    versions={
      "Python": platform.python_version(),
      "deltajax": deltajax.__version__,
      "jax": jax.__version__,
      "flax": importlib.metadata.version("flax"),
    },
    devices=f"{len(devices)} x {first.device_kind} ({first.platform})",
    platform=first.platform,
    dtype=_dtype(first),
    warnings=_warnings(first.platform),
  )


def _dtype(device: Any) -> str:
  if device.platform == "gpu":
    # From Ampere on, NVIDIA's multiply in bfloat16.
    capability = getattr(device, "compute_capability", "0.0")
    return "bfloat16" if gpu_refusal(capability) is None else "float32"
  return "bfloat16" if device.platform == "tpu" else "float32"


def _warnings(platform_name: str) -> tuple[str, ...]:
  if platform_name != "cpu":
    return ()
  if pathlib.Path("/dev/nvidiactl").exists():
    return (
      "there is an NVIDIA GPU here, but JAX computes on the CPU: pip install"
      " 'jax[cuda12]', and restart.",
    )
  if "COLAB_RELEASE_TAG" in os.environ:
    return (
      "JAX computes on the CPU, which is slow: choose a GPU under Runtime,"
      " Change runtime type.",
    )
  return (
    "JAX found no GPU or TPU and computes on the CPU, which is slow: keep"
    " settings small.",
  )
