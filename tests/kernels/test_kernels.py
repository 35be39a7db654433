"""The kernels, interpreted, against the definition."""

import dataclasses
import itertools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernel_parity import Case
from deltajax.kernels import tpu_plan
from tests.helpers import changed_fields
from tests.kernels.cases import (
  assert_close,
  CASES,
  FACTORS,
  function,
  PAIRS,
  run,
)

KERNELS = pytest.mark.parametrize("kernel", ["interpret", "interpret_triton"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_two_values_of_two_factors_meet_in_a_case(dtype):
  for one, two in itertools.combinations(FACTORS, 2):
    met = {
      (getattr(case, one), getattr(case, two))
      for case in PAIRS
      if case.dtype == dtype
    }
    assert met == set(itertools.product(FACTORS[one], FACTORS[two]))


def test_every_case_takes_several_steps_of_the_grid():
  for case in PAIRS:
    assert case.B * case.S * -(-case.T // max(tpu_plan.TILES)) >= 3


@KERNELS
@pytest.mark.parametrize("case", CASES, ids=changed_fields)
def test_interpreted_equals_the_definition(case, kernel):
  assert_close(case, run(case, kernel))


def test_the_interpreter_poisons_what_is_not_written():
  """Outputs that a kernel leaves out would be NaN, and no case has any."""
  half = jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)

  def write_half(out_ref):
    out_ref[0] = jnp.ones((8, 128))

  def skip_odd(seen_ref, out_ref):
    del seen_ref

    @pl.when(pl.program_id(0) == 0)
    def _():
      out_ref[0] = jnp.ones((8, 128))

  whole = pl.pallas_call(write_half, out_shape=half, interpret=True)
  blocks = pl.pallas_call(
    skip_odd,
    out_shape=half,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(2,),
      in_specs=[],
      out_specs=pl.BlockSpec((1, 8, 128), lambda i, _: (i, 0, 0)),
    ),
    interpret=True,
  )
  for written in (whole(), blocks(jnp.zeros(1, jnp.int32))):
    np.testing.assert_array_equal(written[0], 1)
    assert np.isnan(written[1]).all()


def with_arrays(case: Case, **changes) -> Case:
  """A case with other inputs."""
  names = ("queries", "slots", "d_read", "d_slots")
  arrays = dict(zip(names, case.arrays, strict=True)) | changes
  changed = dataclasses.replace(case)
  changed.__dict__["arrays"] = tuple(arrays.values())
  return changed


@KERNELS
def test_one_source_has_weight_one_and_gives_the_query_no_gradient(kernel):
  case = Case(S=9, R=2, visible=(1, 1), D=96)
  _, slots, d_read, _ = case.arrays
  no_lse = d_read._replace(lse_RxHxBxT=0 * d_read.lse_RxHxBxT)
  mix, _, d_queries, _ = run(with_arrays(case, d_read=no_lse), kernel)
  np.testing.assert_array_equal(mix, np.stack([slots[0], slots[0]]))
  np.testing.assert_array_equal(d_queries, 0)


@KERNELS
def test_slots_that_nobody_sees_have_no_effect_and_keep_their_gradient(kernel):
  case = Case(R=2, visible=(3, 4))
  expected = run(case, kernel)
  _, slots, _, d_slots = case.arrays
  np.testing.assert_array_equal(expected[3][4:], d_slots[4:])
  bad = slots.copy()
  bad[4:] = np.nan
  for x, y in zip(
    run(with_arrays(case, slots=bad), kernel), expected, strict=True
  ):
    np.testing.assert_array_equal(x, y)


@KERNELS
@pytest.mark.parametrize(
  "case",
  [
    Case(S=5, T=300, R=2, dtype="bfloat16"),
    Case(S=3, T=1100, R=3, D=123, visible=(3, 0, 2), heads=3),
    Case(S=2, D=1280, T=520, B=1, dtype="bfloat16", key_size=64),
  ],
  ids=changed_fields,
)
def test_two_runs_give_the_same_bits(case, kernel):
  call = function(case, kernel)
  for x, y in zip(call(), call(), strict=True):
    np.testing.assert_array_equal(x, y)
