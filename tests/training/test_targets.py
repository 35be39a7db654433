import importlib.util

import jax
import pytest

from deltajax.config import ConfigError
from deltajax.training.targets import get_target

has_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: make libtpu",
)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("nonsense", "unknown topology 'nonsense'. Valid: v4:2x2x4, v5e:4x4"),
    ("v5p", "unknown topology 'v5p'. Valid"),
    ("v9:2x2", "unknown TPU 'v9'.*Valid: v4, v5e, v5p, v6e"),
    ("v5p:4x4", "v5p has 3 axes, as in v5p:4x4x4"),
    ("v5e:4x4x4", "v5e has 2 axes, as in v5e:4x4"),
    ("v5e:0x4", "unknown topology 'v5e:0x4'"),
    ("0*v5e:4x4", r"unknown topology '0\*v5e:4x4'"),
    ("cpu:0", "target 'cpu:0' has no devices"),
    ("cpu:999", "JAX has started with [0-9]+ CPU devices"),
  ],
)
def test_names_that_mean_no_target(name, message):
  jax.devices()  # JAX has started.
  with pytest.raises(ConfigError, match=message):
    get_target(name)


@has_libtpu
def test_a_slice_that_libtpu_refuses():
  with pytest.raises(ConfigError, match=r"'v5e:3x5': .*not divisible"):
    get_target("v5e:3x5")


@pytest.mark.parametrize(
  ("name", "module", "message"),
  [
    ("v5e:4x4", "libtpu", r"pip install '.\[tpu\]'"),
    ("gpu:8", "jax_cuda12_plugin", r"pip install 'jax\[cuda12\]'"),
  ],
)
def test_says_what_to_install(name, module, message, monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name == module else find(name),
  )
  with pytest.raises(ConfigError, match=message):
    get_target(name)


@has_libtpu
@pytest.mark.parametrize(
  ("name", "count", "slices"),
  [
    ("v4:2x2x4", 16, 1),
    ("v5p:1x1x1", 1, 1),
    ("v5p:4x4x4", 64, 1),
    ("2*v5e:4x4", 32, 2),
  ],
)
def test_devices_of_a_target(name, count, slices):
  target = get_target(name)
  assert len(target.devices) == count
  of_slices = {getattr(d, "slice_index", 0) or 0 for d in target.devices}
  assert len(of_slices) == slices
  assert target.hbm_bytes > 10 * 2**30
