"""Standard errors against what they estimate."""

import math

import numpy as np

from deltajax.evaluation.estimates import UnitSums


def quality(nats, tokens, num_bytes, pieces=1):
  sums = UnitSums()
  split = [np.array_split(x, pieces) for x in (nats, tokens, num_bytes)]
  for part in zip(*split, strict=True):
    sums.add(*part)
  return sums.quality()


def draw(rng, units):
  """Units of very different sizes, whose nats follow their size."""
  tokens = rng.integers(1, 200, units)
  rate = 2 + rng.standard_normal(units) * 0.5
  return rate * tokens, tokens, 4 * tokens + rng.integers(0, 9, units)


def test_values_by_hand():
  found = quality(*map(np.array, ([2.0, 4.0], [1, 3], [2, 6])))
  assert found.loss.value == 1.5
  # Residuals 2 - 1.5 and 4 - 4.5: sqrt(2 * (0.25 + 0.25)) / 4.
  assert math.isclose(found.loss.standard_error, 0.25)
  assert math.isclose(found.perplexity.value, math.exp(1.5))
  assert math.isclose(found.perplexity.standard_error, 0.25 * math.exp(1.5))
  assert math.isclose(found.bits_per_byte.value, 0.75 / math.log(2))
  assert math.isclose(found.bits_per_byte.standard_error, 0.125 / math.log(2))
  assert (found.tokens, found.bytes, found.units) == (4, 8, 2)


def test_one_unit_has_no_standard_error_and_none_is_invented():
  found = quality(*map(np.array, ([2.0, 0.0], [2, 0], [0, 0])))
  assert found.units == 1
  assert found.loss.standard_error is None
  assert found.perplexity.standard_error is None
  assert found.bits_per_byte is None


def test_the_same_however_units_come():
  values = draw(np.random.default_rng(0), 100)
  one, many = quality(*values), quality(*values, pieces=17)
  for name in ("loss", "bits_per_byte", "perplexity"):
    x, y = getattr(one, name), getattr(many, name)
    np.testing.assert_allclose(x.value, y.value, rtol=1e-12)
    np.testing.assert_allclose(x.standard_error, y.standard_error, rtol=1e-9)


def test_equal_units_have_no_error():
  found = quality(*(np.full(50, x) for x in (3.7, 5.0, 11.0)))
  assert found.loss.standard_error < 1e-7


def test_standard_errors_are_how_much_estimates_vary():
  rng = np.random.default_rng(1)
  found = [quality(*draw(rng, 40)) for _ in range(1500)]
  for name in ("loss", "bits_per_byte"):
    estimates = [getattr(x, name) for x in found]
    spread = np.std([x.value for x in estimates])
    told = np.sqrt(np.mean([x.standard_error**2 for x in estimates]))
    assert 0.93 < told / spread < 1.07
