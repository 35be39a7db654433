"""What a run reads, and whether it is what the run has read before."""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any

import numpy as np

from deltajax.config import ConfigError, DataConfig, RunConfig
from deltajax.data.packing import Batch
from deltajax.data.pipeline import (
  load_mixture,
  Mixture,
  validation_batches,
)
from deltajax.data.tokenizers import (
  check_vocabulary,
  get_tokenizer,
  Tokenizer,
)


@dataclasses.dataclass(frozen=True)
class RunData:
  """Everything that a run reads.

  Attributes:
    tokenizer: of the text.
    train: rows to learn from.
    validation: the fixed validation batches.
  """

  tokenizer: Tokenizer
  train: Mixture
  validation: Sequence[Batch]


def load_data(config: RunConfig) -> RunData:
  """Reads and checks a run's data.

  Raises:
    ConfigError: if the vocabulary is too small for the tokenizer, the corpus
      is empty, or sequences or batches are larger than the corpus.
  """
  data = config.data
  tokenizer = get_tokenizer(data.tokenizer)
  check_vocabulary(tokenizer, config.model.vocab_size)
  return RunData(
    tokenizer=tokenizer,
    train=load_mixture(data, "train"),
    validation=fixed_rows(config, load_mixture(data, "validation")),
  )


def fixed_rows(config: RunConfig, mixture: Mixture) -> Sequence[Batch]:
  """The batches of an evaluation, in memory."""
  training = config.training
  return validation_batches(
    mixture,
    batch_size=training.batch_size // training.accumulation,
    num_rows=training.eval_sequences,
  )


def digest_of_rows(batches: Sequence[Batch]) -> str:
  """sha256 (hex) of the rows of an evaluation."""
  digest = hashlib.sha256()
  for batch in batches:
    for name in sorted(batch):
      digest.update(np.ascontiguousarray(batch[name]).tobytes())
  return digest.hexdigest()


def parts(data: RunData) -> dict[str, Any]:
  """What decides the order of the training rows, besides the config.

  Plain values, in which a checkpoint says what the run has read.
  """
  return {
    "tokenizer": data.tokenizer.fingerprint,
    "weights": list(data.train.weights),
    "sources": [dataclasses.asdict(x.info) for x in data.train.sources],
  }


def check_same_data(
  position: dict[str, Any], config: DataConfig, data: RunData
) -> None:
  """Raises ConfigError unless data are those that a run has read.

  Args:
    position: in the data, of a checkpoint.
    config: names the data.
    data: as they are now.
  """
  now = data.train.info.fingerprint
  if position["fingerprint"] == now:
    return
  before = position.get("parts", parts(data))
  lines = _differences(before, parts(data), config.datasets) or [
    f"fingerprint: {position['fingerprint'][:12]} in the checkpoint,"
    f" {now[:12]} now"
  ]
  raise ConfigError(
    "the training data are not those that the run was started with:\n  "
    + "\n  ".join(lines)
    + "\nWas a data set built again, by another Python? To go on with the new"
    " data: --training.accept data.content."
  )


def _differences(
  before: dict[str, Any], now: dict[str, Any], names: Sequence[str]
) -> list[str]:
  """Of `parts`, those that differ, with both values."""
  old, new = _named(before, names), _named(now, names)
  return [
    f"{name}: {old[name]} in the checkpoint, {new[name]} now"
    for name in old
    if name in new and old[name] != new[name]
  ]


def _named(parts: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
  """Each of `parts` by a name of its own."""
  found = {k: x for k, x in parts.items() if k != "sources"}
  for name, info in zip(names, parts["sources"], strict=False):
    for field, value in info.items():
      found[f"data set {name}, {field}"] = value
  return found
