"""The reference values of the authors' released model, as model directories.

See tests/testdata/golden/README.md.
"""

import json
import pathlib

import numpy as np
import safetensors
import safetensors.numpy

GOLDEN = pathlib.Path(__file__).parent / "testdata" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))


def load(name: str) -> dict[str, dict[str, np.ndarray]]:
  """Arrays of a file: {group: {name: array}}."""
  groups: dict[str, dict[str, np.ndarray]] = {"param": {}, "grad": {}, "": {}}
  tensors = safetensors.numpy.load_file(GOLDEN / f"{name}.safetensors")
  for key, array in tensors.items():
    group, _, rest = key.rpartition("/") if "/" in key else ("", "", key)
    groups[group][rest] = array
  return groups


def write_directory(name: str, directory: pathlib.Path) -> pathlib.Path:
  """Writes a file's model as the released code would save it."""
  with safetensors.safe_open(GOLDEN / f"{name}.safetensors", "np") as file:
    metadata = file.metadata()
  values = json.loads(metadata["config"]) | {"model_type": "qwen3"}
  if metadata["mode"] != "baseline":
    values |= {
      "model_type": "qwen3_attnres",
      "attnres_mode": metadata["mode"],
      "attnres_num_blocks": int(metadata["num_blocks"]),
      "attnres_gate_type": "bias",
      "attnres_use_null_source": False,
      **json.loads(metadata["extra"]),
    }
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(values))
  safetensors.numpy.save_file(
    load(name)["param"], directory / "model.safetensors"
  )
  return directory
