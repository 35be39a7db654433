"""What models are analysed on."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from deltajax.config import DataConfig
from deltajax.data.packing import Batch
from deltajax.data.pipeline import load_mixture, Mixture, validation_batches


@dataclasses.dataclass(frozen=True)
class AnalysisData:
  """What all models are run on.

  Attributes:
    config: where it comes from.
    split: of the data set.
    mixture: its rows.
    batches: those of them that are read.
  """

  config: DataConfig
  split: str
  mixture: Mixture
  batches: Sequence[Batch]

  @property
  def rows(self) -> int:
    """How many rows are read; the last batch may hold padding."""
    return sum(int((x["segment_ids"][:, 0] != 0).sum()) for x in self.batches)

  def described(self) -> dict[str, Any]:
    """For `routing.json`."""
    return {
      "datasets": list(self.config.datasets),
      "weights": list(self.mixture.weights),
      "split": self.split,
      "tokenizer": self.config.tokenizer,
      "sequence_length": self.config.sequence_length,
      "rows": self.rows,
      "fingerprint": self.mixture.info.fingerprint,
    }


def load_data(
  config: DataConfig,
  *,
  split: str,
  num_rows: int,
  batch_size: int,
) -> AnalysisData:
  """The rows that are read: the first of an order that never changes.

  Raises:
    ConfigError: as `load_mixture` and `validation_batches` do.
  """
  mixture = load_mixture(config, split)
  batches = validation_batches(
    mixture, batch_size=batch_size, num_rows=num_rows
  )
  return AnalysisData(config, split, mixture, batches)
