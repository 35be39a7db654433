"""What a notebook says first."""

import re
import types

import jax
import pytest

import deltajax
from deltajax import environment as module
from deltajax.environment import environment


def device(platform, kind, **more):
  return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


DEVICES = {
  "Tesla T4": (device("gpu", "Tesla T4", compute_capability="7.5"), "float32"),
  "A100": (device("gpu", "A100", compute_capability="8.0"), "bfloat16"),
  "MI300": (
    device("gpu", "MI300X", compute_capability="gfx942"),
    "float32",
  ),
  "B200": (device("gpu", "B200", compute_capability="10.0"), "bfloat16"),
  "v5e": (device("tpu", "TPU v5 lite"), "bfloat16"),
  "cpu": (device("cpu", "cpu"), "float32"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_computes_in_what_the_device_has(name):
  one, dtype = DEVICES[name]
  found = environment([one, one])
  assert found.dtype == dtype
  assert found.devices == f"2 x {one.device_kind} ({one.platform})"
  assert bool(found.warnings) == (name == "cpu")
  lines = str(found).splitlines()
  assert lines[2].startswith(f"dtype     {dtype},")
  assert any(x.startswith("WARNING") for x in lines) == (name == "cpu")


def test_versions_are_those_that_run():
  found = environment()
  assert found.versions["jax"] == jax.__version__
  assert found.versions["deltajax"] == deltajax.__version__
  assert f"jax {jax.__version__}" in str(found)


@pytest.mark.parametrize(
  "place, message",
  [
    ("gpu", r"an NVIDIA GPU here.*pip install 'jax\[cuda12\]'"),
    ("colab", "choose a GPU under Runtime"),
    ("plain", "found no GPU or TPU"),
  ],
)
def test_a_fall_back_to_the_cpu_says_what_to_do(place, message, monkeypatch):
  monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
  if place == "colab":
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
  monkeypatch.setattr(
    module.pathlib.Path, "exists", lambda self: place == "gpu"
  )
  found = environment([DEVICES["cpu"][0]])
  (warning,) = found.warnings
  assert re.search(message, warning)
