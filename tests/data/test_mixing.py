"""Turns of data sets: exact shares, each row once, at any place at once."""

from fractions import Fraction
import itertools
import math

from hypothesis import given, settings, strategies as st
import pytest

from deltajax.data.mixing import cumulative, turn

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=9).map(
  lambda parts: [x / sum(parts) for x in parts]
)


@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, begin=st.integers(0, 10**15))
def test_shares_hold_and_no_turn_is_missed(weights, begin):
  sums = cumulative(weights)
  turns = [turn(begin + k, sums) for k in range(200)]
  bound = math.ceil(math.log2(len(weights)))
  for i, (low, high) in enumerate(itertools.pairwise(sums)):
    share = Fraction(high - low, sums[-1])
    own = [(k, j) for k, (which, j) in enumerate(turns) if which == i]
    # Its turns follow one another.
    assert [j - own[0][1] for _, j in own] == list(range(len(own)))
    for k, j in own:
      assert abs(j - (begin + k) * share) <= bound


@pytest.mark.parametrize(
  "weights", [(0.7, 0.3), (1 / 3, 2 / 3), (0.999999, 0.000001)]
)
def test_shares_after_many_rows(weights):
  number = 10**12
  first = turn(number, cumulative(weights))
  counts = {first[0]: first[1]}
  k = number + 1
  while len(counts) < 2:
    which, count = turn(k, cumulative(weights))
    counts.setdefault(which, count)
    k += 1
  for i, weight in enumerate(weights):
    assert abs(counts[i] - weight * number) < 1.01


def test_weights_are_what_is_written():
  assert cumulative([0.7, 0.3]) == [0, 7, 10]
  assert [turn(k, [0, 7, 10])[0] for k in range(10)].count(0) == 7
