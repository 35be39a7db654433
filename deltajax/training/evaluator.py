"""How good the state of a run is, on rows that never change."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from deltajax.analysis.analyze import conclude
from deltajax.analysis.observe import Observer
from deltajax.analysis.reads import model_reads
from deltajax.data.packing import Batch, target_mask
from deltajax.data.pipeline import find_mixture
from deltajax.training import hosts
from deltajax.training.mesh import place_own_rows
from deltajax.training.run_data import digest_of_rows, fixed_rows, RunData
from deltajax.training.step import Trainer
from deltajax.training.watchdog import Watchdog


class Evaluator:
  """Evaluates parameters; all hosts must make the same calls.

  Args:
    trainer: the functions of the run.
    data: what it reads.
    watchdog: is told what is done.
    log: takes lines for the console.
  """

  def __init__(
    self,
    trainer: Trainer,
    data: RunData,
    watchdog: Watchdog,
    log: Callable[[str], None],
  ):
    self._trainer = trainer
    self._data = data
    self._watchdog = watchdog
    self._log = log
    self._loss = jax.jit(trainer.loss)
    self._bytes_per_token = np.asarray(data.tokenizer.bytes_per_token)
    config = trainer.config
    self._observer = None
    if config.training.eval_routing and model_reads(config.model):
      self._observer = Observer(
        config.model,
        config.data.sequence_length,
        trainer.sharding,
        gradients=False,
      )

  def validate(self, params: Any) -> dict[str, float]:
    """Loss in nats per token and bits per byte on the validation set."""
    self._watchdog.begin("validation")
    return self._quality("validation", params, self._data.validation)

  def test(self, params: Any) -> dict[str, float]:
    """The same on text that nothing was chosen by; empty if there is none.

    As many rows as in validation, of the split `test` of the run's data. What
    cannot be read is said, and costs nothing but this.
    """
    self._watchdog.begin("test")
    try:
      # It may have to be packed yet.
      batches = hosts.main_host_first(self._test_batches)
      hosts.agree({"test split": digest_of_rows(batches)})
    except Exception as error:  # Any: other hosts only learn that there is one.
      self._log(f"WARNING   the test split cannot be used: {error}")
      return {}
    return self._quality("test", params, batches) if batches else {}

  def routing(self, params: Any) -> dict[str, float]:
    """How sharply the model routes, beside a uniform read; see `Totals`."""
    if self._observer is None:
      return {}
    self._watchdog.begin("routing")
    rows = self._trainer.sharding.num_shards("batch")
    batch = {name: x[:rows] for name, x in self._data.validation[0].items()}
    observed = self._observer.total(params, [batch])
    totals = conclude(self._observer, observed).totals
    if totals is None:
      return {}
    values = dataclasses.asdict(totals)
    return {f"routing/{k}": x for k, x in values.items() if x is not None}

  def _test_batches(self) -> Sequence[Batch]:
    config = self._trainer.config
    mixture = find_mixture(config.data, "test")
    return [] if mixture is None else fixed_rows(config, mixture)

  def _quality(
    self, split: str, params: Any, batches: Sequence[Batch]
  ) -> dict[str, float]:
    loss = tokens = num_bytes = 0.0
    for batch in batches:
      placed = place_own_rows(self._trainer.sharding, batch)
      sums = self._loss(params, placed)
      mask = target_mask(batch["segment_ids"])
      loss += float(sums.loss)
      tokens += float(sums.tokens)
      bytes_of = self._bytes_per_token[batch["tokens"][:, 1:]]
      num_bytes += float((bytes_of * mask).sum())
    values = {
      "loss": loss / tokens,
      "perplexity": math.exp(min(loss / tokens, 700.0)),
      "bits_per_byte": loss / math.log(2) / num_bytes,
    }
    self._log(
      f"{split:<11} loss {values['loss']:.4f}"
      f"  perplexity {values['perplexity']:.2f}"
      f"  bits per byte {values['bits_per_byte']:.4f}"
    )
    return {f"{split}/{name}": x for name, x in values.items()}
