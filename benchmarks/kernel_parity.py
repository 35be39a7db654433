"""Does the kernel of this machine equal the definition, and itself?

    python benchmarks/kernel_parity.py --json F
    python benchmarks/kernel_parity.py --implementation interpret --small

Reads and gradients of the implementation that is chosen on this platform,
beside the definition in float64 on the CPU: the largest error relative to the
largest element. Every case runs twice and must give the same bits. Exit code 1
if not, or if errors are larger than rounding explains. The tests of the kernels
ask the same of them, interpreted, for cases of their own.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.routing.depth_attention import choose_reader, READERS
from deltajax.routing.partial_read import MASKED, PartialRead
from deltajax.routing.readers import case_of, read_slots
from train.cli import check_json_file, main, RUN_ERROR, write_json_file

EPS = 1e-6
NAMES = ("mix", "lse", "d_queries", "d_slots")


class Error(NamedTuple):
  """Errors of an array, relative to its largest element.

  Attributes:
    most: 99% of the elements are at most so far off.
    all: every element is.
  """

  most: float
  all: float

  def within(self, bound: "Error") -> bool:
    """Whether it is small enough; not where anything is NaN."""
    return self.most <= bound.most and self.all <= bound.all


BOUNDS = {"float32": Error(1e-5, 1e-4), "bfloat16": Error(1e-2, 3e-2)}
# The gradient has the mix as it was written, rounded; few tokens are too few to
# average that.
ROUNDED_MIX = Error(3e-2, 9e-2)


@dataclasses.dataclass(frozen=True)
class Case:
  """A pass over the memory and its gradient.

  Attributes:
    S: slots.
    D: width.
    T: tokens of a sequence.
    R: reads.
    B: sequences.
    heads: H.
    key_size: K; None for D.
    visible: how many slots each read sees; None for all.
    dtype: of the memory.
    x64: whether JAX may use 64 bits around the pass.
  """

  S: int = 9
  D: int = 64
  T: int = 7
  R: int = 1
  B: int = 2
  heads: int = 1
  key_size: int | None = None
  visible: tuple[int, ...] | None = None
  dtype: str = "float32"
  x64: bool = False

  @functools.cached_property
  def arrays(self) -> tuple:
    """Queries, slots, and gradients of the read and the slots, as NumPy.

    Elements are what the dtype of the memory can hold, in float32.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
      return rng.standard_normal(shape, np.float32)

    def rounded(x):
      return np.asarray(jnp.asarray(x, self.dtype), np.float32)

    tokens = (self.B, self.T)
    memory = (self.S, *tokens, self.D)
    key_size = self.key_size or self.D
    return (
      normal(self.R, key_size) * np.float32(4 / np.sqrt(key_size)),
      rounded(normal(*memory) * normal(self.S, 1, 1, 1)),
      PartialRead(
        rounded(normal(self.R, *tokens, self.D)),
        normal(self.R, self.heads, *tokens),
      ),
      rounded(normal(*memory)),
    )

  def function(
    self, reader: str, dtype: str | None = None, jit: Callable = jax.jit
  ) -> Callable[[], list[np.ndarray]]:
    """What a call computes: `NAMES`, in float64.

    Args:
      reader: the implementation.
      dtype: None for that of the memory.
      jit: that it is compiled with.
    """
    dtype = dtype or self.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    visible = np.array(self.visible or [self.S] * self.R, np.int32)
    queries, slots, (d_mix, d_lse), d_slots = self.arrays

    @jit
    def read(queries, slots, d_read, d_slots):
      case = case_of(queries, slots, self.heads, EPS)
      (found, _), pull = jax.vjp(
        lambda q, x: read_slots(READERS[reader], q, x, visible, case),
        queries,
        slots,
      )
      return *found, *pull((d_read, d_slots))

    def call():
      with jax.enable_x64(self.x64 or dtype == "float64"):
        found = read(
          jnp.asarray(queries, wide),
          jnp.asarray(slots, dtype),
          PartialRead(jnp.asarray(d_mix, dtype), jnp.asarray(d_lse, wide)),
          jnp.asarray(d_slots, dtype),
        )
        return [np.asarray(x, np.float64) for x in found]

    return call

  def expected(self, jit: Callable = jax.jit) -> list[np.ndarray]:
    """What the definition gives in float64 on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
      return self.function("reference", "float64", jit)()

  def bound(self, name: str) -> Error:
    """Of the errors that rounding explains."""
    if name == "d_queries" and self.dtype == "bfloat16":
      return ROUNDED_MIX
    return BOUNDS[self.dtype]


def errors_of(
  found: list[np.ndarray], expected: list[np.ndarray]
) -> dict[str, Error]:
  """Errors of what a reader gives, by name."""
  errors = {}
  for name, x, y in zip(NAMES, found, expected, strict=True):
    y = np.where(y <= MASKED, np.float32(MASKED), y)
    # Some are exactly zero everywhere: compared absolutely.
    scale = np.abs(y[y > MASKED / 2]).max(initial=1e-2)
    error = np.abs(x - y) / scale
    errors[name] = Error(float(np.quantile(error, 0.99)), float(error.max()))
  return errors


CASES = (
  Case(S=1, D=1024, T=256),
  Case(S=9, D=1024, T=256, R=2, visible=(9, 4)),
  Case(S=9, D=1280, T=1000, R=3, visible=(0, 9, 8)),
  Case(S=33, D=1536, T=128, R=2, heads=4, visible=(33, 20)),
  Case(S=9, D=1536, T=7, R=8, key_size=512),
  Case(S=73, D=4096, T=128, R=3, visible=(73, 72, 1)),
  Case(S=9, D=7168, T=128, R=2),
  Case(S=9, D=96, T=128, R=2, heads=3, key_size=48),
  Case(S=5, D=123, T=100, R=2, visible=(5, 3)),
)
SMALL_CASES = (
  Case(S=3, D=96, R=2, visible=(3, 1)),
  Case(S=2, D=96, heads=3, key_size=48),
)


@dataclasses.dataclass(frozen=True)
class Options:
  """What is compared.

  Attributes:
    implementation: None for the one that is chosen for each case.
    small: only what an interpreted kernel does in seconds.
    json: also write the rows to this file.
  """

  implementation: str | None = None
  small: bool = False
  json: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """A case, compared.

  Attributes:
    case: shapes and dtype.
    implementation: that was compared.
    errors: of each array.
    same_bits: whether two runs gave the same.
    good: whether they did and errors are within their bounds.
  """

  case: Case
  implementation: str
  errors: dict[str, Error]
  same_bits: bool
  good: bool


def compare(case: Case, implementation: str | None) -> Row:
  static = case_of(
    jax.ShapeDtypeStruct((case.R, case.key_size or case.D), jnp.float32),
    jax.ShapeDtypeStruct((case.S, case.B, case.T, case.D), case.dtype),
    case.heads,
    EPS,
  )
  name = choose_reader(static, implementation).name
  call = case.function(name)
  found, again = call(), call()
  same_bits = all(map(np.array_equal, found, again))
  errors = errors_of(found, case.expected())
  close = all(error.within(case.bound(name)) for name, error in errors.items())
  return Row(case, name, errors, same_bits, same_bits and close)


def as_line(row: Row) -> str:
  case = row.case
  shape = (
    f"S {case.S:<3} D {case.D:<5} T {case.T:<5} R {case.R} H {case.heads}"
    f" K {case.key_size or case.D:<5} {case.dtype:<9}"
  )
  errors = (f"{name} {error.all:.1e}" for name, error in row.errors.items())
  bits = "same bits" if row.same_bits else "OTHER BITS"
  line = "  ".join((shape, *errors, bits, row.implementation))
  return line if row.good else f"{line}  BAD"


def as_json(row: Row) -> dict[str, Any]:
  errors = {name: error._asdict() for name, error in row.errors.items()}
  return dataclasses.asdict(row) | {"errors": errors}


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  check_json_file(options.json)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  rows = []
  for dtype in ("float32", "bfloat16"):
    for case in SMALL_CASES if options.small else CASES:
      case = dataclasses.replace(case, dtype=dtype)
      rows.append(compare(case, options.implementation))
      print(as_line(rows[-1]), flush=True)
  write_json_file(options.json, [as_json(row) for row in rows])
  good = sum(row.good for row in rows)
  print(f"{good} of {len(rows)} cases are good")
  if good < len(rows):
    raise SystemExit(RUN_ERROR)


if __name__ == "__main__":
  main(command)
