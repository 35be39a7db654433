"""Statistics of paired differences, one for each seed."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Interval:
  """Where a mean may lie.

  Attributes:
    low: lower end.
    high: upper end.
  """

  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class PairedStatistics:
  """What n paired differences say of their mean.

  Attributes:
    mean: of the differences.
    deviation: sample standard deviation (n - 1); None of one difference.
    t_interval: of the mean, 95%, by Student's t; None of one difference.
    p_value: two-sided, of the paired t test; None where the differences do not
      vary.
    bootstrap_interval: of the mean, 95%, percentiles over resampled
      differences; None of one.
    below: how many are below 0.
    above: how many are above 0.
    sign_p_value: two-sided, of the sign test, which leaves out zeros.
  """

  mean: float
  deviation: float | None
  t_interval: Interval | None
  p_value: float | None
  bootstrap_interval: Interval | None
  below: int
  above: int
  sign_p_value: float


def paired_statistics(
  differences: Sequence[float], *, seed: int = 0
) -> PairedStatistics:
  """What paired differences say of their mean.

  Args:
    differences: one for each pair, at least one.
    seed: of the bootstrap's resampling.
  """
  from scipy import special

  values = np.asarray(differences, np.float64)
  count, mean = len(values), float(values.mean())
  below, above = int((values < 0).sum()), int((values > 0).sum())
  deviation = t_interval = p_value = bootstrap = None
  if count > 1:
    deviation = float(values.std(ddof=1))
    error = deviation / math.sqrt(count)
    quantile = special.stdtrit(count - 1, (1 + CONFIDENCE) / 2)
    t_interval = Interval(mean - quantile * error, mean + quantile * error)
    bootstrap = bootstrap_interval(values, seed=seed)
    if error:
      p_value = float(2 * special.stdtr(count - 1, -abs(mean) / error))
  return PairedStatistics(
    mean=mean,
    deviation=deviation,
    t_interval=t_interval,
    p_value=p_value,
    bootstrap_interval=bootstrap,
    below=below,
    above=above,
    sign_p_value=sign_test(below, above),
  )


def bootstrap_interval(
  values: Sequence[float] | np.ndarray, *, seed: int
) -> Interval:
  """Percentile interval of the mean of resampled values, 95%.

  Args:
    values: the sample.
    seed: of the resampling, whose draws NumPy never changes.
  """
  sample = np.asarray(values, np.float64)
  draws = np.random.RandomState(seed).randint(
    len(sample), size=(RESAMPLES, len(sample))
  )
  tail = (1 - CONFIDENCE) / 2
  low, high = np.quantile(sample[draws].mean(axis=1), [tail, 1 - tail])
  return Interval(float(low), float(high))


def sign_test(below: int, above: int) -> float:
  """Two-sided p value of as unequal counts, or more so, of fair signs.

  Args:
    below: one count.
    above: the other.
  """
  count, fewer = below + above, min(below, above)
  tail = sum(math.comb(count, k) for k in range(fewer + 1))
  return min(1.0, 2 * tail / 2**count)
