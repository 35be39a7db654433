"""Steps that disagree, and steps that fail."""

import pytest

from benchmarks import variant_steps
from benchmarks.variant_steps import compare, Options, Step


@pytest.mark.parametrize(
  ("found", "error"),
  [
    (Step(4.0, 1.0, 2.0), None),
    (Step(4.0, 1.01, 2.0), "differs by more than 0.001"),
    (Step(4.0, 1.0, float("nan")), "not finite"),
    (RuntimeError("no such instruction"), "no such instruction"),
  ],
)
def test_beside_xla(monkeypatch, found, error):
  def one_step(config):
    if config.model.depth_attention == "xla":
      return Step(4.0, 1.0001, 2.0)
    if isinstance(found, Exception):
      raise found
    return found

  monkeypatch.setattr(variant_steps, "one_step", one_step)
  row = compare(Options(), "delta", "pallas_triton")
  assert row.error == error
  assert row.implementation == "pallas_triton"
  # Nothing is read: the kernel is not run.
  assert compare(Options(), "standard", "pallas_triton").error is None
