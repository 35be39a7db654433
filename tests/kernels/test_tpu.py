"""What is particular to the TPU kernel: tiles, and the real compiler."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernel_parity import Case, EPS
from deltajax.kernels import tpu
from deltajax.routing.depth_attention import READERS
from deltajax.routing.partial_read import PartialRead, ReadCase
from deltajax.training.targets import get_target
from tests.helpers import precision
from tests.kernels.cases import assert_close, run

KIND = "TPU v5"
INTERPRETED = "TPU v5 lite"  # what the interpreter takes itself for


def test_several_tiles_and_chunks_of_rows():
  case = Case(S=3, T=1300, D=2560, B=1, R=2)
  for backward in (False, True):
    tile = tpu.choose_tile(1300, 2560, 2, 1, "float32", backward, INTERPRETED)
    assert -(-1300 // tile.tokens) >= 3
    assert tile.tokens // tile.rows >= 2
    assert 1300 % tile.tokens  # The last tile goes beyond the end.
  assert_close(case, run(case, "interpret"))


def read_case(**changes):
  fields = {
    **{"reads": 2, "heads": 1, "key_size": 1024, "width": 1024},
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
    (
      {"width": 8192, "reads": 8},
      "8 reads of width 8192 in bfloat16 need [0-9]+ MiB of VMEM .* 40 MiB",
    ),
    ({"width": 8192, "device_kind": "TPU v4"}, "10 MiB may be used on TPU v4$"),
  ],
)
def test_what_it_does_not_support(changes, reason):
  found = READERS["pallas_tpu"].refusal(read_case(**changes))
  if reason is None:
    assert found is None
  else:
    assert re.search(reason, found), found


@pytest.mark.parametrize("length", [1, 7, 100, 128, 200, 300, 384, 2048])
@pytest.mark.parametrize("backward", [False, True])
def test_tiles_are_whole_lanes_and_chunks_whole_tiles_of_registers(
  length, backward
):
  for width in (576, 1024, 4096):
    tile = tpu.choose_tile(length, width, 2, 1, "bfloat16", backward, KIND)
    assert tile.tokens == length or tile.tokens % tpu.LANES == 0
    assert tile.tokens <= length
    assert tile.rows == tile.tokens or tile.rows % 16 == 0
    assert tile.tokens % tile.rows == 0


def test_compiles_with_x64_enabled():
  pytest.importorskip("libtpu")
  device = get_target("v5p:1x1x1").devices[0]
  on_device = jax.sharding.SingleDeviceSharding(device)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

  def both(queries, memory, visible):
    read = tpu.read_forward(
      queries, memory, visible, 1, EPS, device_kind=device.device_kind
    )
    return tpu.read_backward(
      *(queries, memory, visible, *read, *read, memory, 1, EPS),
      device_kind=device.device_kind,
    )

  with precision("float64"):
    jax.jit(both).lower(
      array((2, 4096), "float32"),
      array((9, 2, 1024, 4096), "bfloat16"),
      array((2,), "int32"),
    ).compile()


@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
def test_compiles_for_tpu(target):
  """The real compiler, without a TPU: no VMEM overflow, nothing unsupported."""
  pytest.importorskip("libtpu")
  device = get_target(target).devices[0]
  on_device = jax.sharding.SingleDeviceSharding(device)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

  for S, D, R, T, heads, dtype in (
    (2, 1024, 2, 2048, 1, "bfloat16"),
    (9, 1280, 2, 2048, 1, "float32"),
    (33, 4096, 3, 2048, 1, "bfloat16"),
    (73, 7168, 2, 1024, 1, "bfloat16"),
    (9, 7168, 1, 1024, 1, "float32"),
    (9, 4096, 1, 2048, 1, "float32"),
    (9, 1280, 2, 1000, 4, "bfloat16"),
    (9, 1024, 1, 7, 1, "bfloat16"),
    (9, 1024, 1, 100, 1, "float32"),
    (9, 1024, 2, 300, 1, "bfloat16"),
    (9, 4096, 2, 384, 1, "bfloat16"),
    (9, 832, 3, 2048, 1, "bfloat16"),
    (9, 576, 3, 2048, 1, "float32"),
    (3, 123, 1, 200, 1, "bfloat16"),
  ):
    memory = array((S, 2, T, D), dtype)
    read = PartialRead(
      array((R, 2, T, D), dtype), array((R, heads, 2, T), "float32")
    )
    options = {"device_kind": device.device_kind}
    queries, visible = array((R, D), "float32"), array((R,), "int32")

    def forward(*args, heads=heads, options=options):
      return tpu.read_forward(*args, heads, EPS, **options)

    def backward(*args, heads=heads, options=options):
      return tpu.read_backward(*args, heads, EPS, **options)

    jax.jit(forward).lower(queries, memory, visible).compile()
    compiled = (
      jax.jit(backward, donate_argnums=7)
      .lower(queries, memory, visible, *read, *read, memory)
      .compile()
    )
    # The gradient of the memory is written where it lies.
    stats = compiled.memory_analysis()
    size = S * 2 * T * D * jnp.dtype(dtype).itemsize
    assert stats.alias_size_in_bytes >= size
    if size > 2**27:
      assert stats.temp_size_in_bytes < size / 2
