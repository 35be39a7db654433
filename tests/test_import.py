"""What `import deltajax` costs and brings along."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

HEAVY = (
  *("grain", "orbax", "tensorflow_datasets", "array_record", "tensorboardX"),
  *("tensorflow", "torch", "tyro", "optax", "safetensors", "matplotlib"),
  *("tokenizers", "pyarrow", "huggingface_hub"),
)


def loaded_by(module):
  """Packages that are loaded once a module has been imported."""
  code = (
    f"import sys, {module};"
    " print(' '.join({name.split('.')[0] for name in sys.modules}))"
  )
  printed = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  return set(printed.split())


@pytest.mark.smoke
def test_import_is_light():
  assert not loaded_by("deltajax") & set(HEAVY)


def test_import_starts_no_device():
  code = (
    # It can be set only as long as there is no device.
    "import deltajax, jax; jax.config.update('jax_num_cpu_devices', 3);"
    " print(jax.device_count())"
  )
  printed = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  assert printed.strip() == "3"


# From below; a room may import those of its own floor and of lower ones.
FLOORS = (
  ("kernels",),
  ("routing",),
  ("config", "extras", "files"),
  ("data",),
  ("models",),
  ("checkpoints",),
  ("training", "analysis"),
  ("evaluation", "comparison"),
)


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_arrows_point_down(floor):
  may = {room for rooms in FLOORS[: floor + 1] for room in rooms}
  for room in FLOORS[floor]:
    place = ROOT / "deltajax" / room
    for path in place.glob("*.py") if place.is_dir() else [f"{place}.py"]:
      imported = re.findall(
        r"^\s*(?:from|import) deltajax\.(\w+)",
        pathlib.Path(path).read_text(),
        re.MULTILINE,
      )
      assert set(imported) <= may, path
