"""Does the kernel of this machine equal the definition, and itself?

    python benchmarks/kernel_parity.py [--implementation interpret]

Reads and gradients of the implementation that is chosen on this platform,
beside the definition in float64 on the CPU: the largest error relative to the
largest element. Every case runs twice and must give the same bits. Exit code 1
if not, or if an error is larger than rounding explains.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from deltajax.routing.depth_attention import choose_reader, READERS
from deltajax.routing.partial_read import PartialRead
from deltajax.routing.readers import case_of, read_slots
from train.cli import main, RUN_ERROR

EPS = 1e-6
BOUND = {"float32": 1e-4, "bfloat16": 4e-2}
NAMES = ("mix", "lse", "d_queries", "d_slots")
# S, D, T, R, H, K, visible
CASES = (
  (1, 1024, 256, 1, 1, 1024, (1,)),
  (9, 1024, 256, 2, 1, 1024, (9, 4)),
  (9, 1280, 1000, 3, 1, 1280, (0, 9, 8)),
  (33, 1536, 128, 2, 4, 1536, (33, 20)),
  (9, 1536, 7, 8, 1, 512, (9,) * 8),
  (73, 4096, 128, 3, 1, 4096, (73, 72, 1)),
  (9, 7168, 128, 2, 1, 7168, (9, 9)),
  (9, 96, 128, 2, 3, 48, (9, 9)),
  (5, 123, 100, 2, 1, 123, (5, 3)),
)


@dataclasses.dataclass(frozen=True)
class Options:
  """What is compared.

  Attributes:
    implementation: None for the one that is chosen for each case.
  """

  implementation: str | None = None


def arrays(case, dtype):
  S, D, T, R, H, K, _ = case
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.standard_normal(shape, np.float32)

  rounded = [
    jnp.asarray(x, dtype)
    for x in (
      normal(S, 2, T, D) * normal(S, 1, 1, 1),
      normal(R, 2, T, D),
      normal(S, 2, T, D),
    )
  ]
  # What both sides get is what the kernel's dtype can hold.
  slots, d_mix, d_slots = (np.asarray(x, np.float64) for x in rounded)
  queries = normal(R, K) * 4 / np.sqrt(K)
  return queries, slots, (d_mix, normal(R, H, 2, T)), d_slots


def run(name, case, dtype, compute_dtype):
  """Reads and gradients, of inputs as `dtype` holds them, as NumPy."""
  queries, slots, (d_mix, d_lse), d_slots = arrays(case, dtype)
  heads, visible = case[4], jnp.array(case[6], jnp.int32)
  wide = jnp.promote_types(compute_dtype, jnp.float32)

  @jax.jit
  def read(queries, slots, d_read, d_slots):
    static = case_of(queries, slots, heads, EPS)
    (found, _), pull = jax.vjp(
      lambda q, x: read_slots(READERS[name], q, x, visible, static),
      queries,
      slots,
    )
    return *found, *pull((d_read, d_slots))

  found = read(
    jnp.asarray(queries, wide),
    jnp.asarray(slots, compute_dtype),
    PartialRead(jnp.asarray(d_mix, compute_dtype), jnp.asarray(d_lse, wide)),
    jnp.asarray(d_slots, compute_dtype),
  )
  return [np.asarray(x, np.float64) for x in found]


def compare(case, dtype, implementation) -> bool:
  S, D, T, R, heads, key_size, _ = case
  static = case_of(
    jax.ShapeDtypeStruct((R, key_size), jnp.float32),
    jax.ShapeDtypeStruct((S, 2, T, D), jnp.dtype(dtype)),
    heads,
    EPS,
  )
  choice = choose_reader(static, implementation)
  found, again = (run(choice.name, case, dtype, dtype) for _ in range(2))
  same_bits = all(map(np.array_equal, found, again))
  with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
    expected = run("reference", case, dtype, "float64")
  errors = []
  for x, y in zip(found, expected, strict=True):
    seen = y > -1e29
    scale = np.abs(y[seen]).max(initial=1e-2)
    errors.append(float(np.abs(x - y)[seen].max(initial=0) / scale))
  good = same_bits and max(errors) < BOUND[dtype]
  print(
    f"S {S:<3} D {D:<5} T {T:<5} R {R} H {heads} K {key_size:<5} {dtype:<9}"
    + "  ".join(
      f"{name} {error:.1e}" for name, error in zip(NAMES, errors, strict=True)
    )
    + ("  same bits" if same_bits else "  OTHER BITS")
    + ("" if good else "  BAD")
    + f"  {choice}",
    flush=True,
  )
  return good


def command(arguments: list[str]) -> None:
  options = tyro.cli(Options, args=arguments)
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
  good = [
    compare(case, dtype, options.implementation)
    for dtype in ("float32", "bfloat16")
    for case in CASES
  ]
  print(f"{sum(good)} of {len(good)} cases are good")
  if not all(good):
    raise SystemExit(RUN_ERROR)


if __name__ == "__main__":
  main(command)
