"""Log-likelihoods of tokens, on one device or on a mesh.

Shapes: B batch, T sequence, D width, P tokens that are scored.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from deltajax.config import ModelConfig
from deltajax.models.transformer import output_head, TransformerLM
from deltajax.routing.sharding import constrain, Sharding, use_sharding
from deltajax.training.loss import token_scores, TokenScores
from deltajax.training.mesh import place_own_rows


class Scorer:
  """The programs that score tokens, built once; each shape compiles once.

  All hosts of a mesh must make the same calls, and get the same results.
  Implementations are chosen for each shape: one that a config names serves the
  shapes of its run, on the devices of that.

  Attributes:
    config: of the model.
    sharding: where everything lies; None for wherever the parameters are.
  """

  def __init__(self, config: ModelConfig, sharding: Sharding | None = None):
    """Takes a model; parameters come with every call."""
    self.config = dataclasses.replace(
      config, attention=None, depth_attention=None
    )
    self.sharding = sharding
    self._model = TransformerLM(self.config)
    # Whole on every device, so that every host can read it.
    whole = None if sharding is None else sharding.named()
    self._rows = jax.jit(self._score_rows, out_shardings=whole)
    self._some = jax.jit(self._score_some, out_shardings=whole)

  @property
  def num_shards(self) -> int:
    """Batches are divisible by it."""
    return 1 if self.sharding is None else self.sharding.num_shards("batch")

  def rows(
    self,
    params: Any,
    inputs: Mapping[str, np.ndarray],
    targets_BxT: np.ndarray,
  ) -> TokenScores:
    """Scores every position; what is returned may not be there yet.

    Args:
      params: of the model, unboxed.
      inputs: int32 arrays [B, T]: `tokens`, `segment_ids` and `positions`.
      targets_BxT: int32, the token after each input.
    """
    placed = self._placed({**inputs, "targets": targets_BxT})
    return self._rows(params, placed)

  def some(
    self,
    params: Any,
    tokens_BxT: np.ndarray,
    places_2xP: np.ndarray,
    targets_P: np.ndarray,
  ) -> TokenScores:
    """Scores tokens at some places; arrays [P].

    Args:
      params: of the model, unboxed.
      tokens_BxT: int32, one text a row, padded behind its end.
      places_2xP: int32, row and position of the inputs that predict them.
      targets_P: int32, the tokens.
    """
    placed = self._placed({"tokens": tokens_BxT})
    return self._some(params, placed["tokens"], places_2xP, targets_P)

  def _placed(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    if self.sharding is None:
      return batch
    return place_own_rows(self.sharding, batch)

  def _score_rows(self, params, batch) -> TokenScores:
    inputs = dict(batch)
    targets_BxT, tokens_BxT = inputs.pop("targets"), inputs.pop("tokens")
    with use_sharding(self.sharding):
      hidden_BxTxD = self._hidden(params, tokens_BxT, **inputs)
      head_DxV = output_head(self.config, params)
      return token_scores(hidden_BxTxD, head_DxV, targets_BxT)

  def _score_some(self, params, tokens_BxT, places_2xP, targets_P):
    with use_sharding(self.sharding):
      hidden_BxTxD = self._hidden(params, tokens_BxT)
      hidden_BxTxD = constrain(hidden_BxTxD, None, None, None)
      # As one sequence, whose tiles bound the logits.
      hidden_1xPxD = hidden_BxTxD[tuple(places_2xP)][None]
    # Not of a mesh's batch, whose shards one sequence does not have.
    head_DxV = output_head(self.config, params)
    scores = token_scores(hidden_1xPxD, head_DxV, targets_P[None])
    return jax.tree.map(lambda x: x[0], scores)

  def _hidden(self, params, tokens_BxT, **inputs) -> Any:
    return self._model.apply(
      {"params": params}, tokens_BxT, **inputs, method="hidden"
    )


def one_late(scored: Iterator[Any]) -> Iterator[Any]:
  """Yields what is computed while the next is started: no device waits."""
  pending = None
  for new in scored:
    if pending is not None:
      yield pending
    pending = new
  if pending is not None:
    yield pending
