"""What is particular to the GPU kernel: it lowers for CUDA, its limits."""

import contextlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernel_parity import Case, EPS
from deltajax.kernels import gpu, gpu_plan
from deltajax.routing.depth_attention import choose_reader, READERS
from tests.kernels.cases import assert_close, run
from tests.kernels.test_tpu import read_case

ROOT = pathlib.Path(__file__).parents[2]


def a_gpu():
  """JAX from 0.11 wants to know of a GPU to lower for."""
  if jax.__version_info__ < (0, 11):
    return contextlib.nullcontext()
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA A100-SXM4-40GB", num_cores=None, platform="gpu"
  )
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((), (), abstract_device=device)
  )


@pytest.mark.parametrize(
  ("S", "D", "R", "heads", "key_size", "dtype"),
  [
    (9, 1024, 2, 1, None, "bfloat16"),
    (2, 123, 1, 1, 17, "float32"),
    (9, 96, 2, 3, 24, "float32"),
    (73, 4096, 3, 1, None, "bfloat16"),
    # Queries, and a mix at a time, are loaded again.
    (9, 4096, 8, 1, None, "bfloat16"),
    (9, 8192, 1, 1, None, "bfloat16"),
  ],
)
def test_lowers_for_cuda(S, D, R, heads, key_size, dtype):
  T = 100
  queries = jnp.zeros((R, key_size or D))
  memory = jnp.zeros((S, 2, T, D), dtype)
  visible = jnp.zeros(R, jnp.int32)
  mix = jnp.zeros((R, 2, T, D), dtype)
  lse = jnp.zeros((R, heads, 2, T))

  def forward(*args):
    return gpu.read_forward(*args, heads, EPS)

  def backward(*args):
    return gpu.read_backward(*args, heads, EPS)

  inputs = (queries, memory, visible)
  gradients = (*inputs, mix, lse, mix, lse, memory)
  for function, args in ((forward, inputs), (backward, gradients)):
    with a_gpu():
      lowered = (
        jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
      )
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


def test_lowers_for_many_tokens_and_writes_gradients_in_place():
  """A program takes several tiles; the memory has more than 2 ** 32 bytes."""
  S, T, D = 73, 8192, 4096
  assert 2 * S * T * D > 2**32
  memory = jax.ShapeDtypeStruct((S, 1, T, D), jnp.bfloat16)
  read = (
    memory.update(shape=(2, 1, T, D)),
    jax.ShapeDtypeStruct((2, 1, 1, T), "float32"),
  )
  queries = jax.ShapeDtypeStruct((2, D), jnp.float32)
  visible = jax.ShapeDtypeStruct((2,), jnp.int32)
  for x64 in (False, True):
    with jax.enable_x64(x64), a_gpu():
      backward = jax.jit(lambda *args: gpu.read_backward(*args, 1, EPS))
      traced = backward.trace(queries, memory, visible, *read, *read, memory)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert (
      "output_operand_alias<output_tuple_indices = [0], operand_index = 7"
      in text
    )


def test_programs_that_take_several_tiles():
  case = Case(S=3, T=1100, D=1280, R=2, B=1)
  tile = gpu_plan.choose_tile(case.T, case.D, case.R, 1, backward=True)
  assert tile.tokens * gpu.BACKWARD_PROGRAMS < case.T
  assert_close(case, run(case, "interpret_triton"))


def test_what_does_not_stay_in_registers_is_loaded_again(monkeypatch):
  """As wide vectors of many reads are, whatever the case."""
  monkeypatch.setattr(gpu_plan, "REGISTERS", 20_000)
  case = Case(S=5, T=9, D=1280, R=3, heads=2, visible=(5, 0, 3))
  for backward in (False, True):
    assert not gpu_plan.choose_tile(9, 1280, 3, 2, backward).keeps
  assert_close(case, run(case, "interpret_triton"))


def test_what_serves_on_a_gpu():
  assert choose_reader(read_case(), platform="gpu").name == "pallas_triton"
  assert READERS["pallas_triton"].refusal(read_case(width=123)) is None
  ampere = read_case(compute_capability="8.0")
  assert choose_reader(ampere, platform="gpu").name == "pallas_triton"
  t4 = choose_reader(read_case(compute_capability="7.5"), platform="gpu")
  assert t4.name == "xla"
  assert "8.0, this GPU has 7.5" in t4.rejected["pallas_triton"]
  amd = choose_reader(read_case(compute_capability="gfx942"), platform="gpu")
  assert amd.rejected["pallas_triton"] == (
    "it needs an NVIDIA GPU, this one is gfx942"
  )
  wide = choose_reader(read_case(width=8192, reads=3), platform="gpu")
  assert wide.name == "xla"
  assert wide.rejected["pallas_triton"] == (
    "3 reads of width 8192 need 73,728 registers for one token, a program may"
    " use 61,440"
  )
  in_float64 = choose_reader(read_case(dtype="float64"), platform="gpu")
  assert "float64" in in_float64.rejected["pallas_triton"]


WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # as if there were none
import jax.numpy as jnp
import deltajax
from deltajax.routing.depth_attention import choose_reader
from deltajax.routing.readers import case_of
case = case_of(jnp.ones((1, 8)), jnp.ones((2, 1, 4, 8)), 1, 1e-6)
print(choose_reader(case, platform="gpu"))
for name, platform in (("pallas_triton", "gpu"), ("interpret_triton", None)):
  try:
    choose_reader(case, name, platform)
  except deltajax.ConfigError as error:
    print(error)
"""


def test_a_jax_without_triton_is_a_reason():
  done = subprocess.run(
    [sys.executable, "-c", WITHOUT_TRITON],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  chosen, *named = done.stdout.splitlines()
  reason = f"JAX {jax.__version__} has no jax.experimental.pallas.triton"
  assert chosen.startswith("xla ")
  assert f"not pallas_triton: {reason}" in chosen
  assert len(named) == 2
  assert all(f"cannot serve: {reason}" in line for line in named)
