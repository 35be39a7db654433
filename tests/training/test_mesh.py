import jax
import pytest

from deltajax.config import ConfigError, MeshConfig
from deltajax.training.mesh import axis_sizes, check_fit, make_mesh, Size
from tests.helpers import EIGHT_DEVICES, QUICK_FLAGS, run_module
from tests.training.mesh_program import LAYOUTS, run_config


@pytest.mark.parametrize("variant", LAYOUTS)
def test_every_mesh_of_8_devices_equals_one_device(variant):
  flags = f"{EIGHT_DEVICES['XLA_FLAGS']} {QUICK_FLAGS}"
  done = run_module(
    "tests.training.mesh_program", variant, env={"XLA_FLAGS": flags}
  )
  assert done.returncode == 0, done.stderr
  expected = [f"equal {variant} {layout}" for layout in LAYOUTS[variant]]
  assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
  ("sizes", "devices", "expected"),
  [
    ({}, 8, (8, 1, 1, 1)),
    ({"fsdp": 4}, 8, (2, 4, 1, 1)),
    ({"data": 2, "fsdp": -1, "tensor": 2}, 8, (2, 2, 2, 1)),
    ({"data": 1, "context": -1}, 8, (1, 1, 1, 8)),
  ],
)
def test_one_size_is_filled_in(sizes, devices, expected):
  assert axis_sizes(MeshConfig(**sizes), devices) == expected


@pytest.mark.parametrize(
  ("sizes", "devices", "message"),
  [
    ({"data": 64}, 1, "data=64, .* needs 64 devices; there are 1"),
    ({"fsdp": 3}, 8, "8 devices are not divisible by 3"),
    ({"data": 2, "fsdp": 2}, 8, "needs 4 devices; there are 8"),
  ],
)
def test_sizes_that_do_not_multiply(sizes, devices, message):
  with pytest.raises(ConfigError, match=message):
    axis_sizes(MeshConfig(**sizes), devices)


def test_mesh_options_are_checked():
  with pytest.raises(ConfigError, match=r"mesh\.data is 0"):
    MeshConfig(data=0)
  with pytest.raises(ConfigError, match="data and fsdp are -1"):
    MeshConfig(data=-1, fsdp=-1)
  with pytest.raises(ConfigError, match="did you mean 'tensor'"):
    MeshConfig(tensr=2)


class FakeMesh:
  """The shape of a mesh that this machine has no devices for."""

  def __init__(self, *shape):
    self.devices = jax.numpy.zeros(shape)


@pytest.mark.parametrize(
  ("shape", "message"),
  [
    ((16, 1, 1, 1), "rows 8 is not divisible by data x fsdp 16"),
    ((1, 1, 8, 1), r"num_heads 4 .* tensor 8; model\.num_kv_heads 2"),
    ((1, 1, 1, 3), "length 256 is not divisible by context 3"),
    ((1, 5, 1, 1), r"model\.width 16 is not divisible by fsdp 5"),
  ],
)
def test_runs_that_do_not_fit_a_mesh(shape, message):
  config = run_config("delta", (1, 1, 1, 1))
  with pytest.raises(ConfigError, match=message):
    check_fit(
      config.model,
      FakeMesh(*shape),
      rows=Size("rows", 8),
      length=Size("length", config.data.sequence_length),
    )


def test_default_mesh_takes_every_device():
  assert make_mesh(MeshConfig()).devices.size == len(jax.devices())
