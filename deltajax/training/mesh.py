"""Meshes of devices, and how parameters, activations and batches lie on them.

Mesh axes: `data` (copies of the model), `fsdp` (shards of parameters and of
the batch), `tensor` (heads, mlp and vocabulary), `context` (the sequence).
"""

from collections.abc import Mapping, Sequence
import math
import types
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from deltajax.config import ConfigError, MeshConfig, ModelConfig, RunConfig
from deltajax.routing.sharding import MeshAxes, Sharding
from deltajax.training import hosts

AXES = ("data", "fsdp", "tensor", "context")

# Logical axis -> mesh axes. Parameters first, then activations.
RULES: Mapping[str, MeshAxes] = types.MappingProxyType(
  {
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "queries": None,
    "batch": ("data", "fsdp"),
    "sequence": "context",
    "features": None,
    "slots": None,
  }
)


class Size(NamedTuple):
  """How much of something there is.

  Attributes:
    name: what messages call it.
    value: how much.
  """

  name: str
  value: int


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """Builds the mesh; one axis size of -1 takes the devices that are left.

  Where devices are in several slices, `data` is split over the slices.

  Args:
    config: sizes of the axes.
    devices: None for all devices of the run.

  Raises:
    ConfigError: if the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  shape = axis_sizes(config, len(devices))
  slices = {
    getattr(device, "slice_index", 0)
    for device in devices
    if device.platform == "tpu"  # On GPUs it is the node.
  }
  if len(slices) <= 1:
    array = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
    return Mesh(array, AXES)
  if shape[0] % len(slices):
    raise ConfigError(
      f"mesh.data is {shape[0]}, but the devices are in {len(slices)} slices;"
      " data must be a multiple of the slices, since only it is split over"
      " them."
    )
  array = mesh_utils.create_hybrid_device_mesh(
    (shape[0] // len(slices), *shape[1:]),
    (len(slices), *(1 for _ in shape[1:])),
    devices,
    allow_split_physical_axes=True,
  )
  return Mesh(array, AXES)


def axis_sizes(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
  """Sizes of `AXES` on this many devices; -1 is filled in."""
  sizes = [getattr(config, axis) for axis in AXES]
  known = math.prod(size for size in sizes if size != -1)
  named = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True))
  if -1 in sizes:
    if num_devices % known:
      raise ConfigError(
        f"mesh {named}: {num_devices} devices are not divisible by {known},"
        " the product of the sizes that are given."
      )
    sizes[sizes.index(-1)] = num_devices // known
  elif known != num_devices:
    raise ConfigError(
      f"mesh {named} needs {known} devices; there are {num_devices}. Change a"
      " size, or make one of them -1."
    )
  return tuple(sizes)


def check_fit(
  model: ModelConfig, mesh: Mesh, *, rows: Size, length: Size
) -> None:
  """Raises ConfigError, with the numbers, if a model does not fit a mesh.

  Args:
    model: its config.
    mesh: where it would lie.
    rows: of a batch, on all devices at once.
    length: of a sequence.
  """
  size = dict(zip(AXES, mesh.devices.shape, strict=True))
  checks = (
    (*rows, "data x fsdp", size["data"] * size["fsdp"]),
    ("model.width", model.width, "fsdp", size["fsdp"]),
    (
      "routing key_dim",
      model.routing.key_size(model.width),
      "fsdp",
      size["fsdp"],
    ),
    ("model.num_heads", model.num_heads, "tensor", size["tensor"]),
    ("model.num_kv_heads", model.num_kv_heads, "tensor", size["tensor"]),
    ("model.mlp_width", model.mlp_width, "tensor", size["tensor"]),
    ("model.vocab_size", model.vocab_size, "tensor", size["tensor"]),
    (*length, "context", size["context"]),
  )
  problems = [
    f"{name} {value} is not divisible by {axis} {divisor}"
    for name, value, axis, divisor in checks
    if value % divisor
  ]
  if problems:
    raise ConfigError("the mesh does not fit: " + "; ".join(problems) + ".")


def make_sharding(config: RunConfig, devices: Any = None) -> Sharding:
  """The mesh of a run with its rules, checked against the run."""
  mesh = make_mesh(config.mesh, devices)
  training = config.training
  check_fit(
    config.model,
    mesh,
    rows=Size(
      "training.batch_size / accumulation",
      training.batch_size // training.accumulation,
    ),
    length=Size("data.sequence_length", config.data.sequence_length),
  )
  return Sharding(mesh, RULES)


def placed_shapes(sharding: Sharding, boxed_params: Any, tree: Any) -> Any:
  """Says of shapes where they lie: optimizer moments like their parameters.

  Args:
    sharding: where everything lies.
    boxed_params: abstract parameters whose boxes name their axes.
    tree: of ShapeDtypeStructs: unboxed parameters, or a training state.
  """
  specs = nn.get_partition_spec(boxed_params)
  by_path = {
    _names(path): sharding.named(*spec)
    for path, spec in jax.tree_util.tree_leaves_with_path(
      specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
  }
  whole = sharding.named()
  return jax.tree_util.tree_map_with_path(
    lambda path, x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=by_path.get(_names(path), whole)
    ),
    tree,
  )


def _names(path: Any) -> tuple[str, ...]:
  """The dictionary keys of a path: the name of a parameter within a state."""
  return tuple(
    key.key for key in path if isinstance(key, jax.tree_util.DictKey)
  )


def place_batch(
  sharding: Sharding, batch: Mapping[str, np.ndarray], batch_size: int
) -> dict[str, jax.Array]:
  """Makes global arrays [B, T + 1] of the rows that this host has read.

  Args:
    sharding: of the run.
    batch: the rows that this host's devices hold, `hosts.rows_of_host`.
    batch_size: B, rows over all hosts.
  """
  rows = sharding.named("batch", None)
  return {
    name: jax.make_array_from_process_local_data(
      rows, x, (batch_size, *x.shape[1:])
    )
    for name, x in batch.items()
  }


def place_own_rows(
  sharding: Sharding, batch: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
  """As `place_batch`, of a batch that every host has whole."""
  batch_size = len(next(iter(batch.values())))
  rows = hosts.rows_of_host(sharding, batch_size)
  own = {name: x[rows] for name, x in batch.items()}
  return place_batch(sharding, own, batch_size)
