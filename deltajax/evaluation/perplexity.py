"""Perplexity and bits per byte: of packed rows, and of whole documents.

Shapes: B batch, T sequence, V vocabulary, U units.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from deltajax.data.packing import Batch, target_mask
from deltajax.evaluation.estimates import Quality, UnitSums
from deltajax.evaluation.scoring import one_late, Scorer
from deltajax.evaluation.windows import check_windows, window_batches
from deltajax.models.transformer import TransformerLM
from deltajax.routing.validation import ConfigError
from deltajax.training.loss import TokenScores


def evaluate(
  model: TransformerLM,
  params: Any,
  documents: Iterable[jax.typing.ArrayLike],
  *,
  context: int,
  stride: int | None = None,
  batch_size: int = 8,
  bytes_per_token: jax.typing.ArrayLike | None = None,
) -> Quality:
  """Perplexity of documents, each token predicted once.

  Args:
    model: the model.
    params: its unboxed parameters.
    documents: token ids of each, one at a time; the first token of each (the
      one that starts documents) is not predicted.
    context: tokens that the model sees at once.
    stride: tokens that count in a window; every token is predicted from at
      least `context` - `stride` tokens, or all that there are. None: `context`.
    batch_size: windows at once.
    bytes_per_token: bytes_per_token_V, as a tokenizer has it; None: no bits per
      byte.

  Returns:
    Loss (nats per token), perplexity and bits per byte, with standard errors
    over documents.

  Raises:
    ConfigError: for options out of range, documents without a token to
      predict, and ids outside the vocabulary.

  Examples:
    >>> from deltajax import testing
    >>> config = testing.tiny_config(num_layers=1)
    >>> found = evaluate(
    ...   TransformerLM(config),
    ...   testing.random_params(config),
    ...   testing.random_tokens(config, batch=3, length=9),
    ...   context=8,
    ... )
    >>> found.units, found.tokens, found.bits_per_byte
    (3, 24, None)
  """
  size = model.config.vocab_size
  bytes_V = np.zeros(size, np.int32)
  if bytes_per_token is not None:  # Of a tokenizer with fewer ids, perhaps.
    given_V = np.asarray(bytes_per_token)[:size]
    bytes_V[: len(given_V)] = given_V
  return score_documents(
    Scorer(model.config),
    params,
    _checked(documents, size),
    bytes_V,
    context=context,
    stride=context if stride is None else stride,
    batch_size=batch_size,
  )


def score_rows(
  scorer: Scorer,
  params: Any,
  batches: Iterable[Batch],
  bytes_per_token_V: np.ndarray,
) -> Quality:
  """How well a model predicts packed rows, as validation does.

  A unit is a row.

  Args:
    scorer: of the model.
    params: of the model, unboxed.
    batches: of `fixed_batches`.
    bytes_per_token_V: of the tokenizer.

  Raises:
    ConfigError: if there is nothing to predict.
  """
  sums = UnitSums()

  def scored() -> Iterator[tuple[TokenScores, np.ndarray, np.ndarray]]:
    for batch in batches:
      inputs = {name: x[:, :-1] for name, x in batch.items()}
      targets_BxT = batch["tokens"][:, 1:]
      scores = scorer.rows(params, inputs, targets_BxT)
      yield scores, targets_BxT, target_mask(batch["segment_ids"])

  for scores, targets_BxT, mask_BxT in one_late(scored()):
    bytes_BxT = bytes_per_token_V[targets_BxT] * mask_BxT
    nats_BxT = np.asarray(scores.nats_BxT, np.float64) * mask_BxT
    sums.add(nats_BxT.sum(1), mask_BxT.sum(1), bytes_BxT.sum(1))
  return _checked_quality(sums)


def score_documents(
  scorer: Scorer,
  params: Any,
  documents: Iterable[np.ndarray],
  bytes_per_token_V: np.ndarray,
  *,
  context: int,
  stride: int,
  batch_size: int,
) -> Quality:
  """How well a model predicts documents, in windows.

  A unit is a document.

  Args:
    scorer: of the model.
    params: of the model, unboxed.
    documents: int32 ids, the first of which is not predicted.
    bytes_per_token_V: of the tokenizer.
    context: as in `evaluate`, like the next two.
    stride: see there.
    batch_size: see there.

  Raises:
    ConfigError: if there is nothing to predict, or the windows cannot be made.
  """
  check_windows(context, stride)
  if batch_size < 1:
    raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
  sums = UnitSums()
  # Of the newest document, which may go on in the next batch.
  open_number: int = 0
  open_sums_3: np.ndarray = np.zeros(3)
  batches = window_batches(
    documents, context=context, stride=stride, batch_size=batch_size
  )
  scored = (
    (scorer.rows(params, batch.inputs, batch.targets_BxT), batch)
    for batch in batches
  )
  for scores, batch in one_late(scored):
    counts = batch.counts_BxT
    number_P, targets_P = batch.documents_BxT[counts], batch.targets_BxT[counts]
    if number_P[0] != open_number:
      sums.add(*open_sums_3[:, None])
      open_number, open_sums_3 = number_P[0], np.zeros(3)
    values_3xP = (
      np.asarray(scores.nats_BxT, np.float64)[counts],
      np.ones(len(number_P)),
      bytes_per_token_V[targets_P],
    )
    sums_3xU = np.stack(
      [np.bincount(number_P - open_number, weights=x) for x in values_3xP]
    )
    sums_3xU[:, 0] += open_sums_3
    sums.add(*sums_3xU[:, :-1])
    open_number, open_sums_3 = number_P[-1], sums_3xU[:, -1]
  sums.add(*open_sums_3[:, None])
  return _checked_quality(sums)


def limited(
  documents: Iterable[np.ndarray], max_tokens: int | None
) -> Iterator[np.ndarray]:
  """Yields documents until no other one is within a number of predictions.

  Args:
    documents: in order.
    max_tokens: to be predicted, the first of each not among them; None: all.

  Raises:
    ConfigError: if already the first document has more.
  """
  left = max_tokens
  for number, tokens in enumerate(documents):
    if left is not None:
      left -= len(tokens) - 1
      if left < 0 and not number:
        raise ConfigError(
          f"the first document has {len(tokens) - 1} tokens, more than the"
          f" {max_tokens} that are to be scored; give at least as many."
        )
      if left < 0:
        return
    yield tokens


def _checked(
  documents: Iterable[jax.typing.ArrayLike], vocab_size: int
) -> Iterator[np.ndarray]:
  for number, given in enumerate(documents):
    tokens = np.asarray(given)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
      raise ConfigError(
        f"document {number} has shape {tokens.shape} and dtype {tokens.dtype};"
        " give token ids in one dimension."
      )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
      raise ConfigError(
        f"document {number} has ids from {tokens.min()} to {tokens.max()}; the"
        f" model has ids 0 to {vocab_size - 1}."
      )
    yield tokens.astype(np.int32)


def _checked_quality(sums: UnitSums) -> Quality:
  if not sums.tokens:
    raise ConfigError("there is no token to predict in this text.")
  return sums.quality()
