"""What is asked of a kernel, asked of wrong ones."""

import jax
import numpy as np
import pytest

from benchmarks import kernel_parity
from benchmarks.kernel_parity import Case, compare
from deltajax.routing.depth_attention import READERS


def with_reader(monkeypatch, **changes):
  """Lets `xla` do something else."""
  reader = READERS["xla"]._replace(**changes)
  monkeypatch.setattr(kernel_parity, "READERS", READERS | {"xla": reader})


def test_a_reader_that_is_right():
  row = compare(Case(S=3, R=2, visible=(0, 3)), "xla")
  assert row.good
  assert row.same_bits
  assert 0 < row.errors["mix"].all < 1e-6


@pytest.mark.parametrize("scale", [1.001, float("nan")])
def test_a_mix_that_is_wrong(monkeypatch, scale):
  def forward(*args):
    read = READERS["xla"].forward(*args)
    return read._replace(mix_RxBxTxD=read.mix_RxBxTxD * scale)

  with_reader(monkeypatch, forward=forward)
  case = Case(S=3)
  row = compare(case, "xla")
  assert not row.good
  assert not row.errors["mix"].within(case.bound("mix"))
  assert row.errors["lse"].within(case.bound("lse"))
  assert "BAD" in kernel_parity.as_line(row)


def test_bits_that_differ_between_two_runs(monkeypatch):
  rng = np.random.default_rng(0)

  def backward(*args):
    d_queries, d_slots = READERS["xla"].backward(*args)
    noise = jax.pure_callback(
      lambda: np.float32(1e-7 * rng.random()),
      jax.ShapeDtypeStruct((), np.float32),
    )
    return d_queries * (1 + noise), d_slots

  with_reader(monkeypatch, backward=backward)
  row = compare(Case(S=3), "xla")
  assert not row.same_bits
  assert not row.good
