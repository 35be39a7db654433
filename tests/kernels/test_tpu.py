"""What is particular to the TPU kernel: tiles, and the real compiler."""

import re

import jax.numpy as jnp
import pytest

from benchmarks.compile_kernels import compile_pass, one_chip
from benchmarks.kernel_parity import Case, EPS
from deltajax.kernels import tpu_plan
from deltajax.routing.depth_attention import INTERPRETED_TPU, READERS
from deltajax.routing.partial_read import ReadCase
from tests.helpers import precision
from tests.kernels.cases import assert_close, run

KIND = "TPU v5"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_tiles_and_chunks_of_rows(dtype, monkeypatch):
  """On a TPU with so little VMEM that tiles have few tokens."""
  monkeypatch.setitem(tpu_plan.VMEM_MIB, INTERPRETED_TPU, 4)
  monkeypatch.setattr(tpu_plan, "CHUNK_ELEMENTS", 16 * 1280)
  case = Case(S=3, T=200, D=1280, R=1 if dtype == "float32" else 4, dtype=dtype)
  for backward in (False, True):
    tile = tpu_plan.choose_tile(
      case.T, case.D, case.R, 1, dtype, backward, INTERPRETED_TPU
    )
    assert tile.tokens in (32, 64)  # At least 4, the last beyond the end.
    assert tile.rows == 16
  assert_close(case, run(case, "interpret"))


def read_case(**changes):
  fields = {
    **{"reads": 2, "heads": 1, "width": 1024},
    **{
      "length": 2048,
      "dtype": "bfloat16",
      "eps": EPS,
      "device_kind": KIND,
    },
  }
  return ReadCase(**{**fields, **changes})


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({}, None),
    ({"length": 7}, None),
    ({"dtype": "float64"}, "bfloat16 or float32, the dtype is float64"),
    ({"width": 832}, None),
    ({"width": 7168, "reads": 2, "dtype": "float32"}, None),
    ({"width": 8192, "reads": 16}, None),
    (
      {"width": 16_384, "reads": 16},
      "16 reads of width 16384 in bfloat16 need 42 MiB of VMEM for 16 tokens,"
      " 40 MiB may be used on TPU v5$",
    ),
    (
      {"width": 8192, "reads": 8, "device_kind": "TPU v4"},
      "10 MiB may be used on TPU v4$",
    ),
  ],
)
def test_what_it_does_not_support(changes, reason):
  found = READERS["pallas_tpu"].refusal(read_case(**changes))
  if reason is None:
    assert found is None
  else:
    assert re.search(reason, found), found


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_compiles_for_tpu(chip):
  """The real compiler, without a TPU: no VMEM overflow, nothing unsupported."""
  pytest.importorskip("libtpu")
  device = one_chip(chip)
  cases = [
    (2, 1024, 2048, 1, "bfloat16"),
    (73, 7168, 1024, 2, "bfloat16"),
    (33, 7168, 1024, 2, "float32"),  # on v5p the backward tile has 64 tokens
    (9, 1280, 1000, 2, "bfloat16", 4),
  ]
  if chip == "v5p":
    cases += [
      (9, 4096, 2048, 1, "float32"),
      (9, 4096, 384, 2, "bfloat16"),
      (9, 4096, 100, 16, "bfloat16"),  # tiles of 64 tokens
      (9, 1024, 7, 1, "bfloat16"),
      (9, 7168, 127, 4, "bfloat16"),  # would not fit without chunks of rows
      (9, 576, 300, 3, "float32"),
      (9, 832, 2048, 3, "bfloat16"),
      (3, 123, 200, 1, "bfloat16"),
    ]
  for case in cases:
    compile_pass(device, False, *case)
    compiled = compile_pass(device, True, *case)
    # The gradient of the memory is written where it lies.
    S, D, T, _, dtype, *_ = case
    stats = compiled.memory_analysis()
    size = S * 2 * T * D * jnp.dtype(dtype).itemsize
    assert stats.alias_size_in_bytes >= size
    if size > 2**27:
      assert stats.temp_size_in_bytes < size / 2


def test_compiles_with_x64_enabled():
  pytest.importorskip("libtpu")
  with precision("float64"):
    for backward in (False, True):
      compile_pass(one_chip("v5p"), backward, 9, 4096, 1024, 2, "bfloat16")
