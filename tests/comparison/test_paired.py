import numpy as np
import pytest
from scipy import stats

from deltajax.comparison.paired import (
  bootstrap_interval,
  paired_statistics,
  sign_test,
)


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_t_interval_and_p_value_are_those_of_scipy(count):
  rng = np.random.default_rng(count)
  one, other = rng.normal(size=(2, count))
  found = paired_statistics(one - other)
  expected = stats.ttest_rel(one, other)
  interval = expected.confidence_interval(0.95)
  assert found.mean == pytest.approx((one - other).mean())
  assert found.deviation == pytest.approx(np.std(one - other, ddof=1))
  assert found.t_interval.low == pytest.approx(interval.low)
  assert found.t_interval.high == pytest.approx(interval.high)
  assert found.p_value == pytest.approx(expected.pvalue)


def test_three_differences_by_hand():
  found = paired_statistics([-3.0, -2.0, -1.0])
  # A deviation of 1, sqrt(3) in a standard error, and t = 4.3027 with 2
  # degrees of freedom.
  assert (found.mean, found.deviation) == (-2.0, 1.0)
  assert found.t_interval.high == pytest.approx(-2 + 4.302653 / 3**0.5)
  assert (found.below, found.above) == (3, 0)
  assert found.sign_p_value == 0.25


def test_the_interval_covers_the_mean_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for sample in rng.normal(0.3, 1.0, size=(1000, 3)):
    interval = paired_statistics(sample).t_interval
    covered += interval.low <= 0.3 <= interval.high
  assert 925 <= covered <= 975


@pytest.mark.parametrize(
  ("below", "above"), [(0, 0), (3, 0), (5, 5), (1, 8), (20, 4)]
)
def test_sign_test_is_that_of_scipy(below, above):
  expected = 1.0
  if below + above:
    expected = stats.binomtest(below, below + above).pvalue
  assert sign_test(below, above) == pytest.approx(expected)


def test_bootstrap_of_two_values():
  """Means of two draws: the least, the middle and the greatest, as 1:2:1."""
  interval = bootstrap_interval([0.0, 1.0], seed=0)
  assert (interval.low, interval.high) == (0.0, 1.0)


def test_bootstrap_of_three_is_their_range():
  """Each extreme comes once in 27 resamples: more often than 2.5%."""
  interval = bootstrap_interval([0.4, 0.1, 0.9], seed=1)
  assert interval.low == pytest.approx(0.1)
  assert interval.high == pytest.approx(0.9)


def test_bootstrap_approaches_the_t_interval():
  sample = np.random.default_rng(1).normal(2, 3, size=400)
  found = paired_statistics(sample)
  boot, t = found.bootstrap_interval, found.t_interval
  assert boot.low == pytest.approx(t.low, abs=0.05)
  assert boot.high == pytest.approx(t.high, abs=0.05)


def test_equal_runs():
  found = paired_statistics([0.0, 0.0, 0.0])
  assert (found.t_interval.low, found.t_interval.high) == (0, 0)
  assert found.p_value is None
  assert found.sign_p_value == 1


def test_one_pair_has_no_interval():
  found = paired_statistics([-0.5])
  assert found.mean == -0.5
  assert found.t_interval is None
  assert found.bootstrap_interval is None
  assert found.below == 1


def test_the_same_differences_give_the_same_numbers():
  values = [0.1, -0.4, 0.9, 0.2]
  assert paired_statistics(values) == paired_statistics(values)
