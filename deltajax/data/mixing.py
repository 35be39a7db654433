"""Whose turn it is, where several data sets are read together.

Row k of the order comes from one of them, by arithmetic on integers alone. The
data sets are two halves, of which the first gets its turn whenever `k * share`
passes a whole number, and the second all others; so do the halves of each.
"""

from collections.abc import Sequence
from fractions import Fraction
import itertools
import math

# To be raised when the same weights give another order.
VERSION = 1


def cumulative(weights: Sequence[float]) -> list[int]:
  """Sums of the weights before each data set and behind the last, as integers.

  Args:
    weights: positive, of each; as they are written, so 0.7 is 7/10.
  """
  exact = [Fraction(str(weight)) for weight in weights]
  scale = math.lcm(*(x.denominator for x in exact))
  return list(itertools.accumulate((int(x * scale) for x in exact), initial=0))


def turn(number: int, sums: Sequence[int]) -> tuple[int, int]:
  """Which data set a row comes from, and which of that set's turns it is.

  Of the first rows, however many, each data set has its share, to less than one
  row for each halving: 1 of two data sets, 2 of four.

  Args:
    number: of the row, from 0.
    sums: see `cumulative`.
  """
  begin, end = 0, len(sums) - 1
  while end - begin > 1:
    middle = (begin + end) // 2
    share, whole = sums[middle] - sums[begin], sums[end] - sums[begin]
    before = number * share // whole
    if (number + 1) * share // whole > before:
      number, end = before, middle
    else:
      number, begin = number - before, middle
  return begin, number
