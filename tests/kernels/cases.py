"""Calls of the kernels, and what they give beside the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.depth_attention import READERS
from deltajax.routing.partial_read import PartialRead
from deltajax.routing.readers import case_of, read_slots
from tests.helpers import assert_mostly_close, changed_fields

EPS = 1e-6
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
    return changed_fields(self)

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
    assert_mostly_close(x, y, most, all_, name)


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
