"""Means over text, with standard errors.

Text comes in units (documents, or rows of a packed data set) that are taken to
be independent draws; tokens within one are not. What is reported is a ratio of
two sums over units, and its standard error that of a ratio estimator.

Shapes: U units.

References:
  Cochran, Sampling Techniques, 3rd edition, section 2.11; without the factor
  for finite populations.
"""

import dataclasses
import math

import numpy as np

_LARGEST_EXPONENT = 700.0  # What a float64 holds the exponential of.


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number, and how much it would vary with other text of the same kind.

  Attributes:
    value: the number.
    standard_error: of it; None of a single unit.
  """

  value: float
  standard_error: float | None

  def __str__(self) -> str:
    if self.standard_error is None:
      return f"{self.value:.4f}"
    return f"{self.value:.4f} +- {self.standard_error:.4f}"


@dataclasses.dataclass(frozen=True)
class Quality:
  """How well a model predicts some text.

  Attributes:
    loss: nats per token.
    perplexity: e to the loss; its standard error is that of the loss times it.
    bits_per_byte: bits, over the bytes of UTF-8 that the tokens stand for; None
      where they stand for none.
    tokens: how many were predicted, the ends of documents among them.
    bytes: that they stand for.
    units: that they came in.
  """

  loss: Estimate
  perplexity: Estimate
  bits_per_byte: Estimate | None
  tokens: int
  bytes: int
  units: int


class UnitSums:
  """Adds up nats, tokens and bytes of units; keeps no unit."""

  def __init__(self) -> None:
    """Starts with no unit."""
    self._count = 0
    self._sums = np.zeros(3)
    self._products = np.zeros((3, 3))

  def add(
    self, nats_U: np.ndarray, tokens_U: np.ndarray, bytes_U: np.ndarray
  ) -> None:
    """Adds units; those without a token do not count.

    Args:
      nats_U: sum of the negative log-likelihoods of each.
      tokens_U: tokens that were predicted.
      bytes_U: that these stand for.
    """
    units_3xU = np.array([nats_U, tokens_U, bytes_U], np.float64)
    units_3xU = units_3xU[:, units_3xU[1] > 0]
    self._count += units_3xU.shape[1]
    self._sums += units_3xU.sum(axis=1)
    self._products += units_3xU @ units_3xU.T

  @property
  def tokens(self) -> int:
    """That were predicted."""
    return round(self._sums[1])

  def quality(self) -> Quality:
    """What is known of all of them; at least one must have been added."""
    loss = self._ratio(1, 1.0)
    perplexity = math.exp(min(loss.value, _LARGEST_EXPONENT))
    error = loss.standard_error
    num_bytes = self._sums[2]
    return Quality(
      loss=loss,
      perplexity=Estimate(
        perplexity, None if error is None else perplexity * error
      ),
      bits_per_byte=self._ratio(2, 1 / math.log(2)) if num_bytes else None,
      tokens=self.tokens,
      bytes=round(num_bytes),
      units=self._count,
    )

  def _ratio(self, index: int, factor: float) -> Estimate:
    """Nats over another sum, times a factor."""
    n, total = self._count, self._sums[index]
    ratio = self._sums[0] / total
    error = None
    if n > 1:
      products = self._products
      # Of nats that the ratio does not explain.
      squares = (
        products[0, 0]
        - 2 * ratio * products[0, index]
        + ratio**2 * products[index, index]
      )
      variance = max(squares, 0.0) * n / (n - 1)
      error = factor * math.sqrt(variance) / total
    return Estimate(float(factor * ratio), error)
