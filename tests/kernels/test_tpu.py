"""The TPU kernel: interpreted, against the definition; and compiled."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.kernels import tpu
from deltajax.routing.depth_attention import READERS
from deltajax.routing.partial_read import MASKED, PartialRead, ReadCase
from deltajax.routing.readers import case_of, read_slots
from deltajax.training.targets import get_target
from tests.helpers import precision

EPS = 1e-6
KIND = "TPU v5"
# Largest error of 99% of the elements, and of all, relative to the largest.
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 3e-2)}


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes of one call."""

  S: int = 9
  D: int = 64
  T: int = 7
  R: int = 1
  B: int = 2
  heads: int = 1
  key_size: int | None = None
  visible: tuple[int, ...] | None = None  # None: all
  dtype: str = "float32"

  def __str__(self):
    return "-".join(
      f"{field.name}{getattr(self, field.name)}".replace(" ", "")
      for field in dataclasses.fields(self)
      if getattr(self, field.name) != field.default
    )

  @functools.cached_property
  def arrays(self):
    rng = np.random.default_rng(0)

    def normal(*shape):
      return jnp.asarray(rng.standard_normal(shape, np.float32))

    tokens = (self.B, self.T)
    memory = (self.S, *tokens, self.D)
    return (
      normal(self.R, self.key_size or self.D) / 2,
      (normal(*memory) * normal(self.S, 1, 1, 1)).astype(self.dtype),
      PartialRead(
        normal(self.R, *tokens, self.D).astype(self.dtype),
        normal(self.R, self.heads, *tokens),
      ),
      normal(*memory).astype(self.dtype),
    )

  def run(self, name):
    """The read, and gradients of queries and memory; all float32."""
    queries, slots, d_read, d_slots = self.arrays
    visible = jnp.array(self.visible or [self.S] * self.R, jnp.int32)

    @jax.jit
    def run(queries, slots, d_read, d_slots):
      case = case_of(queries, slots, self.heads, EPS)
      (read, _), pull = jax.vjp(
        lambda q, x: read_slots(READERS[name], q, x, visible, case),
        queries,
        slots,
      )
      return *read, *pull((d_read, d_slots))

    found = run(queries, slots, d_read, d_slots)
    return [np.asarray(x, np.float32) for x in found]


def assert_close(found, expected, dtype):
  names = ("mix", "lse", "d_queries", "d_slots")
  for name, x, y in zip(names, found, expected, strict=True):
    most, all_ = TOLERANCE[dtype]
    if name == "d_queries" and dtype == "bfloat16":
      # The gradient has the mix as it was written, rounded; few tokens are
      # too few to average that.
      most, all_ = 3 * most, 3 * all_
    assert np.isfinite(x).all(), name
    y_scale = np.abs(y[y > MASKED]).max(initial=1e-2)
    error = np.abs(x - y) / y_scale
    assert np.quantile(error, 0.99) <= most, name
    assert error.max() <= all_, name


# Every S with every T; D and R take turns, so that all pairs come up.
PAIRS = [
  Case(S=S, T=T, D=(64, 96, 123, 1280, 1536)[(i + j) % 5], R=(1, 2, 8)[k])
  for i, S in enumerate((1, 2, 9, 33, 73))
  for j, T in enumerate((1, 7, 128, 1000))
  for k in [(i + 2 * j) % 3]
  if T * S <= 33_000  # Others take minutes here.
]
CASES = [
  *PAIRS,
  *(dataclasses.replace(case, dtype="bfloat16") for case in PAIRS[::3]),
  Case(visible=(0,)),
  Case(R=3, visible=(0, 4, 9)),
  Case(R=2, T=300, visible=(9, 2)),
  Case(D=96, heads=3, R=2),
  Case(D=96, heads=3, key_size=24, R=2, visible=(5, 8)),
  Case(D=123, key_size=17, R=2),
  Case(D=128, heads=4, key_size=64, R=2, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_equals_the_definition(case):
  assert_close(case.run("interpret"), case.run("reference"), case.dtype)


def test_several_tiles_and_chunks_of_rows():
  case = Case(S=3, T=1500, D=1280, B=1, R=2)
  for backward in (False, True):
    tile = tpu.choose_tile(1500, 1280, 2, 1, "float32", backward, KIND)
    assert -(-1500 // tile.tokens) >= 3
    assert tile.tokens // tile.rows >= 2
    assert 1500 % tile.tokens  # The last tile goes beyond the end.
  assert_close(case.run("interpret"), case.run("xla"), "float32")


def test_with_x64_enabled():
  case = Case(R=2, visible=(3, 9))
  expected = case.run("interpret")
  with precision("float64"):
    found = case.run("interpret")
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_one_source_has_weight_one_and_gives_the_query_no_gradient():
  case = Case(S=9, R=2, visible=(1, 1), D=96)
  queries, slots, d_read, d_slots = case.arrays
  no_lse = d_read._replace(lse_RxHxBxT=0 * d_read.lse_RxHxBxT)
  case.__dict__["arrays"] = (queries, slots, no_lse, d_slots)
  mix, _, d_queries, _ = case.run("interpret")
  np.testing.assert_array_equal(mix, np.stack([slots[0], slots[0]]))
  np.testing.assert_array_equal(d_queries, 0)


def test_slots_that_nobody_sees_have_no_effect_and_keep_their_gradient():
  case = Case(R=2, visible=(3, 4))
  queries, slots, d_read, d_slots = case.arrays
  expected = case.run("interpret")
  np.testing.assert_array_equal(expected[3][4:], d_slots[4:])
  poisoned = dataclasses.replace(case)
  bad = slots.at[4:].set(np.nan)
  poisoned.__dict__["arrays"] = (queries, bad, d_read, d_slots)
  for x, y in zip(poisoned.run("interpret"), expected, strict=True):
    np.testing.assert_array_equal(x, y)


def test_two_runs_give_the_same_bits():
  case = Case(S=5, T=300, R=2, dtype="bfloat16")
  for x, y in zip(case.run("interpret"), case.run("interpret"), strict=True):
    np.testing.assert_array_equal(x, y)


def read_case(**changes):
  fields = {
    **{"reads": 2, "heads": 1, "key_size": 1024, "width": 1024},
    **{"length": 2048, "dtype": "bfloat16", "eps": EPS, "device_kind": KIND},
  }
  return ReadCase(**{**fields, **changes})


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({}, None),
    ({"length": 7}, None),
    ({"dtype": "float64"}, "bfloat16 or float32, the dtype is float64"),
    ({"width": 96}, "multiple of 128, it is 96"),
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


@pytest.mark.parametrize("device_kind", [*tpu.VMEM_MIB, "TPU of tomorrow"])
@pytest.mark.parametrize("backward", [False, True])
def test_tiles_fit(device_kind, backward):
  for width in (1024, 4096) if device_kind != "TPU v4" else (1024,):
    tile = tpu.choose_tile(2048, width, 1, 1, "bfloat16", backward, device_kind)
    assert tile.vmem_bytes <= 5 / 8 * tpu.vmem_bytes(device_kind)
    assert tile.tokens % tpu.LANES == 0
    assert tile.tokens % tile.rows == 0


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
    assert stats.temp_size_in_bytes < size / S + 2**25
