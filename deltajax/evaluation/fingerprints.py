"""Which model, and which code: what a number has to be told with."""

import hashlib
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

from flax import traverse_util
import jax
import numpy as np

import deltajax
from deltajax.config import ModelConfig, to_dict
from deltajax.files import digest_of
from deltajax.training.load import NOT_THE_MODEL

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "lm_eval")


def parameters_digest(params: Any) -> str:
  """sha256 (hex) of names, shapes and values, the latter as float32.

  The same for a run, its export, and the model that is imported of that;
  wherever the parameters lie, on one host.
  """
  found = hashlib.sha256()
  for path, x in sorted(traverse_util.flatten_dict(params).items()):
    array = np.asarray(x, "<f4")
    found.update(f"{'/'.join(path)} {array.shape}\n".encode())
    found.update(np.ascontiguousarray(array).data)
  return found.hexdigest()


def config_digest(config: ModelConfig) -> str:
  """sha256 (hex) of what a model is, not of how it is computed."""
  values = traverse_util.flatten_dict(to_dict(config), sep=".")
  kept = {k: x for k, x in sorted(values.items()) if k not in NOT_THE_MODEL}
  return digest_of(kept)


def code_fingerprint() -> dict[str, Any]:
  """Versions, the commit if the code is in a git repository, and devices."""
  devices = jax.devices()
  status = _git("status", "--porcelain", "--untracked-files=no")
  return {
    "deltajax": deltajax.__version__,
    "commit": _git("rev-parse", "HEAD"),
    "changed": None if status is None else bool(status),
    "python": platform.python_version(),
    **{name: _version(name) for name in _PACKAGES},
    "devices": f"{len(devices)} x {devices[0].device_kind}",
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git(*arguments: str) -> str | None:
  """What git says of the repository that this file is in; None without one."""
  root = pathlib.Path(deltajax.__file__).parents[1]
  if not (root / ".git").exists():
    return None
  try:
    done = subprocess.run(
      ["git", "-C", str(root), *arguments],
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()
