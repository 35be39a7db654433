"""Machines that a program can be compiled for without having them.

v5p:4x4x4       64 TPU v5p chips
2*v5e:4x4       two slices of 16 TPU v5e chips
cpu:8           8 devices of this machine's CPU
gpu:8           8 GPUs like the one here, through JAX's CUDA plugin
"""

from collections.abc import Mapping
import dataclasses
import importlib.util
import math
import os
import re
import types
from typing import Any

import jax
from jax.experimental import topologies

from deltajax.extras import install
from deltajax.routing.choice import has_cuda_plugin
from deltajax.routing.validation import ConfigError, unknown_name

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of TPU chip.

  Attributes:
    axes: of the torus of a slice.
    hbm_bytes: what the compiler lets a program use, read off libtpu 0.0.42's
      message on a program that is too large.
    example: a slice.
    options: of libtpu's description; without one, each v4 core is a device.
  """

  axes: int
  hbm_bytes: int
  example: str
  options: tuple[tuple[str, Any], ...] = ()


CHIPS: Mapping[str, Chip] = types.MappingProxyType(
  {
    "v4": Chip(
      3, int(30.75 * GIB), "v4:2x2x4", (("chip_config_name", "megacore"),)
    ),
    "v5e": Chip(2, int(15.75 * GIB), "v5e:4x4"),
    "v5p": Chip(3, int(95.74 * GIB), "v5p:4x4x4"),
    "v6e": Chip(2, int(31.25 * GIB), "v6e:16x16"),
  }
)
VALID = ", ".join(
  [
    *(chip.example for chip in CHIPS.values()),
    *("slices as 2*v5e:4x4", "cpu:8", "gpu:8"),
  ]
)

_TPU = re.compile(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)+)")
_COUNTED = re.compile(r"(cpu|gpu):(\d+)")


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to compile for.

  Attributes:
    name: as it was asked for.
    devices: may be descriptions, on which nothing can run.
    hbm_bytes: that a program may use on one of them; None if not known.
  """

  name: str
  devices: tuple[Any, ...]
  hbm_bytes: int | None


def get_target(name: str) -> Target:
  """The devices of a name; call it before anything has started JAX.

  Raises:
    ConfigError: for a name that means no target, and one that this
      installation cannot describe.
  """
  if counted := _COUNTED.fullmatch(name):
    kind, count = counted[1], int(counted[2])
    if not count:
      raise ConfigError(f"target {name!r} has no devices.")
    devices = _cpus(count) if kind == "cpu" else _gpus(name, count)
    return Target(name, tuple(devices), None)
  match = _TPU.fullmatch(name)
  if match is None:
    raise ConfigError(f"unknown topology {name!r}. Valid: {VALID}.")
  slices, kind, layout = int(match[1] or 1), match[2], match[3]
  if kind not in CHIPS:
    raise ConfigError(
      f"{unknown_name('TPU', kind, CHIPS)} Topologies: {VALID}."
    )
  chip = CHIPS[kind]
  shape = tuple(map(int, layout.split("x")))
  if len(shape) != chip.axes or not slices * math.prod(shape):
    raise ConfigError(
      f"unknown topology {name!r}: {kind} has {chip.axes} axes, as in"
      f" {chip.example}."
    )
  devices = _tpus(name, f"{kind}:{layout}", chip, slices)
  return Target(name, tuple(devices), chip.hbm_bytes)


def _tpus(name: str, slice_name: str, chip: Chip, slices: int):
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      f"target {name!r} needs libtpu, which is not installed: {install('tpu')}."
    )
  # No TPU is looked for, several compilers may run on one machine, and libtpu
  # does not complain that this is no TPU host.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  jax.config.update("jax_platforms", "cpu")
  options = dict(chip.options)
  if slice_name.endswith((":1x1", ":1x1x1")):
    options["chips_per_host_bounds"] = (1, 1, 1)  # else 2 x 2 x 1
  if slices > 1:
    options["num_slices"] = slices
  try:
    topology = topologies.get_topology_desc(slice_name, "tpu", **options)
  except jax.errors.JaxRuntimeError as error:
    raise ConfigError(
      f"libtpu does not know the topology {name!r}: {error}. Valid: {VALID}."
    ) from None
  return topology.devices


def _cpus(count: int):
  try:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError:  # JAX has started.
    pass
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise ConfigError(
      f"target 'cpu:{count}': JAX has started with {len(devices)} CPU devices."
    )
  return devices[:count]


def _gpus(name: str, count: int):
  if not has_cuda_plugin():
    raise ConfigError(
      f"target {name!r} needs JAX's CUDA plugin, which is not installed: pip"
      " install 'jax[cuda12]' or 'jax[cuda13]'."
    )
  try:
    topology = topologies.get_topology_desc("", "cuda", topology=f"1x1x{count}")
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    raise ConfigError(
      f"target {name!r}: JAX's CUDA plugin describes no GPUs here; it needs"
      f" an NVIDIA driver ({error})."
    ) from None
  return topology.devices
