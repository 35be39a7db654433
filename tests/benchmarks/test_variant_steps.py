"""Steps that disagree, and steps that fail."""

import pytest

from benchmarks import variant_steps
from benchmarks.variant_steps import compare, Options


@pytest.mark.parametrize(
  ("found", "error"),
  [
    ((4.0, 1.0), None),
    ((4.0, 1.01), "differs by more than 0.001"),
    ((float("nan"), 1.0), "not finite"),
    (RuntimeError("no such instruction"), "no such instruction"),
  ],
)
def test_beside_xla(monkeypatch, found, error):
  def one_step(config):
    if config.model.depth_attention == "xla":
      return 4.0, 1.0001
    if isinstance(found, Exception):
      raise found
    return found

  monkeypatch.setattr(variant_steps, "one_step", one_step)
  row = compare(Options(), "delta", "pallas_triton")
  assert row.error == error
  assert row.implementation == "pallas_triton"
  # Nothing is read: the kernel is not run.
  assert compare(Options(), "standard", "pallas_triton").error is None
