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
  *("tokenizers", "pyarrow"),
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


@pytest.mark.parametrize(
  ("room", "may"),
  [
    ("routing", ("deltajax.routing", "deltajax.kernels")),
    ("kernels", ("deltajax.kernels",)),
  ],
)
def test_the_routing_library_imports_nothing_of_the_rest(room, may):
  for path in (ROOT / "deltajax" / room).glob("*.py"):
    for imported in re.findall(
      r"^\s*(?:from|import) (deltajax\S*)", path.read_text(), re.MULTILINE
    ):
      assert imported.startswith(may), path
