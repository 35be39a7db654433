"""The kernels, interpreted, against the definition."""

import dataclasses

import numpy as np
import pytest

from tests.helpers import precision
from tests.kernels.cases import assert_close, Case, CASES

KERNELS = pytest.mark.parametrize("kernel", ["interpret", "interpret_triton"])


@KERNELS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_equals_the_definition(case, kernel):
  assert_close(case.run(kernel), case.run("reference"), case.dtype)


@KERNELS
def test_with_x64_enabled(kernel):
  case = Case(R=2, visible=(3, 9))
  expected = case.run(kernel)
  with precision("float64"):
    found = case.run(kernel)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@KERNELS
def test_one_source_has_weight_one_and_gives_the_query_no_gradient(kernel):
  case = Case(S=9, R=2, visible=(1, 1), D=96)
  queries, slots, d_read, d_slots = case.arrays
  no_lse = d_read._replace(lse_RxHxBxT=0 * d_read.lse_RxHxBxT)
  case.__dict__["arrays"] = (queries, slots, no_lse, d_slots)
  mix, _, d_queries, _ = case.run(kernel)
  np.testing.assert_array_equal(mix, np.stack([slots[0], slots[0]]))
  np.testing.assert_array_equal(d_queries, 0)


@KERNELS
def test_slots_that_nobody_sees_have_no_effect_and_keep_their_gradient(kernel):
  case = Case(R=2, visible=(3, 4))
  queries, slots, d_read, d_slots = case.arrays
  expected = case.run(kernel)
  np.testing.assert_array_equal(expected[3][4:], d_slots[4:])
  poisoned = dataclasses.replace(case)
  bad = slots.at[4:].set(np.nan)
  poisoned.__dict__["arrays"] = (queries, bad, d_read, d_slots)
  for x, y in zip(poisoned.run(kernel), expected, strict=True):
    np.testing.assert_array_equal(x, y)


@KERNELS
def test_two_runs_give_the_same_bits(kernel):
  case = Case(S=5, T=300, R=2, dtype="bfloat16")
  for x, y in zip(case.run(kernel), case.run(kernel), strict=True):
    np.testing.assert_array_equal(x, y)
