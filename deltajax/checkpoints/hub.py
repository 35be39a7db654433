"""Model directories of the Hugging Face hub, by their names there."""

import os
import pathlib
import re

from deltajax.checkpoints import config_json
from deltajax.checkpoints.huggingface import COMPANIONS
from deltajax.config import ConfigError
from deltajax.extras import install

FILES = (
  config_json.NAME,
  "*.safetensors",
  "model.safetensors.index.json",
  *COMPANIONS,
)
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_directory(model: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the directory of a model, fetched from the hub if it is not here.

  Files of the hub are kept in its cache, and are not fetched again.

  Args:
    model: a directory, or the name of a model on the hub, such as
      `HuggingFaceTB/SmolLM2-135M`.

  Raises:
    ConfigError: if it is no directory, and no name or not to be had.
  """
  directory = pathlib.Path(model).expanduser()
  if directory.is_dir():
    return directory
  if not _NAME.fullmatch(str(model)):
    raise ConfigError(
      f"there is no directory {model}; a model of the hub has a name like"
      " HuggingFaceTB/SmolLM2-135M."
    )
  try:
    import huggingface_hub
  except ModuleNotFoundError:
    raise ConfigError(
      f"there is no directory {model}, and the hub needs huggingface_hub:"
      f" {install('pretrained')}."
    ) from None
  try:
    found = huggingface_hub.snapshot_download(
      str(model), allow_patterns=list(FILES)
    )
  except Exception as error:  # Of the network, the hub, the disk.
    raise ConfigError(
      f"there is no directory {model}, and the hub does not give a model of"
      f" this name: {error}"
    ) from None
  return pathlib.Path(found)
