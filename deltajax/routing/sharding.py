"""Which mesh a program is traced for, and what its axes stand for.

Arrays are constrained by the logical names of their axes. Without a mesh,
constraints do nothing, so that models and routing never ask whether there is
one.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltajax.routing.validation import check_name

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Sharding:
  """A mesh, and the mesh axes that each logical axis is split over.

  Attributes:
    mesh: of devices.
    rules: logical axis -> mesh axes; None for an axis that stays whole.
  """

  mesh: Mesh
  rules: Mapping[str, MeshAxes]

  @property
  def platform(self) -> str:
    """Of the devices: `cpu`, `gpu` or `tpu`."""
    return _platform_of(self.device)

  @property
  def device(self) -> Any:
    """One of the devices; all are alike."""
    return self.mesh.devices.flat[0]

  def named(self, *axes: str | None) -> NamedSharding:
    """The sharding of an array with these logical axes; None stays whole."""
    for axis in axes:
      if axis is not None:
        check_name("logical axis", axis, self.rules)
    spec = PartitionSpec(
      *(None if axis is None else self.rules[axis] for axis in axes)
    )
    return NamedSharding(self.mesh, spec)

  def mesh_axes(self, *axes: str) -> tuple[str, ...]:
    """The mesh axes that these logical axes are split over."""
    names: list[str] = []
    for axis in axes:
      mesh_axes = self.rules[axis] or ()
      names += (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    return tuple(names)

  def num_shards(self, *axes: str) -> int:
    """Into how many parts an array with these logical axes is split."""
    return math.prod(self.mesh.shape[name] for name in self.mesh_axes(*axes))

  def shard_map(
    self, function: Callable[..., Any], in_axes: Any, out_axes: Any
  ) -> Callable[..., Any]:
    """A function that runs on every device with its part of the arguments.

    Args:
      function: of arrays.
      in_axes: the logical axes of every argument, a tuple for each.
      out_axes: those of its results, in trees like theirs.
    """

    def specs(tree):
      return jax.tree.map(
        lambda axes: self.named(*axes).spec, tree, is_leaf=_is_axes
      )

    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=specs(in_axes),
      out_specs=specs(out_axes),
      check_vma=False,
    )


def _is_axes(x: Any) -> bool:
  return type(x) is tuple and all(
    axis is None or isinstance(axis, str) for axis in x
  )


_active: contextvars.ContextVar[Sharding | None] = contextvars.ContextVar(
  "sharding", default=None
)


def active_sharding() -> Sharding | None:
  """The sharding that is traced for, if any."""
  return _active.get()


def traced_device() -> Any:
  """One of the devices that a program is traced for.

  One of the mesh if there is one, otherwise JAX's default device. Whoever
  compiles for devices that this machine does not have gives them as a mesh.
  """
  sharding = active_sharding()
  if sharding is not None:
    return sharding.device
  default: Any = getattr(jax.config, "jax_default_device", None)
  if default is None or isinstance(default, str):
    return jax.devices(default)[0]
  return default


def traced_platform() -> str:
  """The platform of `traced_device`: `cpu`, `gpu` or `tpu`."""
  return _platform_of(traced_device())


def _platform_of(device: Any) -> str:
  platform = device.platform
  return "gpu" if platform in ("cuda", "rocm") else platform


@contextlib.contextmanager
def use_sharding(sharding: Sharding | None) -> Iterator[None]:
  """Constraints inside of this context refer to `sharding`."""
  token = _active.set(sharding)
  try:
    yield
  finally:
    _active.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Constrains an array by the logical names of its axes.

  Args:
    x: an array.
    *axes: a name for each axis, None for one that stays whole.
  """
  sharding = _active.get()
  if sharding is None:
    return x
  return jax.lax.with_sharding_constraint(x, sharding.named(*axes))
