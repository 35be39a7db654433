"""Calls of the kernels, and what they give beside the definition."""

from collections.abc import Mapping, Sequence
import functools
import itertools

import jax
import numpy as np

from benchmarks.kernel_parity import Case, errors_of
from deltajax.kernels.tpu_plan import TILES
from tests.helpers import quick_jit


def run(case: Case, kernel: str) -> list[np.ndarray]:
  """The read, and gradients of queries and memory."""
  return function(case, kernel)()


def function(case: Case, kernel: str):
  """As `Case.function`, compiled as fast as is good for the case."""
  # Programs that are compiled quickly copy the whole memory at every step.
  small = case.S * case.B * case.T * case.D * case.R < 1_000_000
  return case.function(kernel, jit=quick_jit if small else jax.jit)


def assert_close(case: Case, found: list[np.ndarray]) -> None:
  """Checks what a kernel gave, by fraction of the elements."""
  for name, error in errors_of(found, _expected(case)).items():
    assert error.within(case.bound(name)), (name, error, case.bound(name))


@functools.cache
def _expected(case: Case) -> list[np.ndarray]:
  return case.expected(quick_jit)


def _pairs(rows, factors) -> set[tuple]:
  """Every two values of two factors that occur in one row."""
  return {
    pair
    for row in rows
    for pair in itertools.combinations(zip(factors, row, strict=True), 2)
  }


def covering(factors: Mapping[str, Sequence], price) -> list[dict]:
  """Few, cheap combinations in which every pair of values occurs.

  Args:
    factors: name -> values.
    price: of a combination, relative to what every one costs.
  """
  candidates = [
    (row, _pairs([row], factors), 1 + price(*row))
    for row in itertools.product(*factors.values())
  ]
  left = set().union(*(pairs for _, pairs, _ in candidates))
  chosen = []
  while left:
    row, pairs, _ = max(candidates, key=lambda x: len(x[1] & left) / x[2])
    chosen.append(dict(zip(factors, row, strict=True)))
    left -= pairs
  return chosen


FACTORS = {
  "S": (1, 2, 9, 33, 73),
  "D": (64, 96, 123, 1280, 1536),
  "T": (1, 7, 128, 1000),
  "R": (1, 2, 8),
  "x64": (False, True),
}


def _price(S, D, T, R, x64):
  """Interpreted, this many elements take as long as compiling does."""
  return S * D * T * (R + 1) / 3e6


def _batch(S: int, T: int) -> int:
  """Few sequences, but at least three steps of the TPU kernel's grid."""
  if S == 1 and -(-T // max(TILES)) == 1:
    return 3
  return 1 if S * T > 10_000 else 2


PAIRS = [
  Case(B=_batch(fields["S"], fields["T"]), dtype=dtype, **fields)
  for dtype in ("float32", "bfloat16")
  for fields in covering(FACTORS, _price)
]
CASES = [
  *PAIRS,
  Case(visible=(0,)),
  Case(R=3, visible=(0, 4, 9)),
  Case(R=2, T=300, visible=(9, 2)),
  Case(D=96, heads=3, R=2),
  Case(D=96, heads=3, key_size=24, R=2, visible=(5, 8)),
  Case(D=123, key_size=17, R=2),
  Case(D=128, heads=4, key_size=64, R=2, dtype="bfloat16"),
]
