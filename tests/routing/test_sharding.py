"""Which devices a program is traced for."""

import types

import jax
import numpy as np
import pytest

from deltajax.routing.sharding import (
  Sharding,
  traced_device,
  traced_platform,
  use_sharding,
)


def test_without_a_mesh_it_is_the_default_device(monkeypatch):
  cpus = jax.devices("cpu")
  gpus = [types.SimpleNamespace(platform="cuda")]
  monkeypatch.setattr(jax, "devices", {None: gpus, "cpu": cpus}.__getitem__)
  assert traced_device() is gpus[0]
  assert traced_platform() == "gpu"
  for default in ("cpu", cpus[0]):
    with jax.default_device(default):
      assert traced_device() is cpus[0]
      assert traced_platform() == "cpu"


@pytest.mark.parametrize(
  ("of_device", "platform"), [("tpu", "tpu"), ("cuda", "gpu"), ("gpu", "gpu")]
)
def test_a_mesh_may_be_of_devices_that_are_not_there(of_device, platform):
  device = types.SimpleNamespace(platform=of_device)
  mesh = types.SimpleNamespace(devices=np.array([[device]]))
  with use_sharding(Sharding(mesh, {})):  # type: ignore[arg-type]
    assert traced_device() is device
    assert traced_platform() == platform
