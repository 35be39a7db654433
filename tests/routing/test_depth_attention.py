"""Depth attention: `xla` against the definition, and what must always hold."""

import dataclasses
import functools
from typing import Any

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from deltajax.routing import (
  ConfigError,
  depth_attention,
  depth_attention_weights,
  Sources,
)
from tests.helpers import (
  assert_mostly_close,
  changed_fields,
  precision,
  quick_jit,
)

BATCH = 2
EPS = 1e-6
# Largest error of 99% of the elements, and of all, relative to the largest
# element of the array.
TOLERANCE = {
  "float32": (1e-5, 1e-4),
  "bfloat16": (1e-2, 3e-2),
  "float64": (1e-12, 1e-12),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes and options of one call."""

  S: int = 9
  D: int = 64
  T: int = 7
  R: int = 1
  heads: int = 1
  key_dim: int | None = None
  null: bool = False
  running: bool | None = None  # None: no such source; else its presence
  stream: bool = True
  visible: int | None = None  # None: all
  dtype: str = "float32"
  seed: int = 0

  def __str__(self):
    return changed_fields(self)

  @property
  def num_visible(self) -> int:
    return self.S if self.visible is None else self.visible

  def arrays(self) -> dict[str, Any]:
    """Differentiable inputs."""
    rng = np.random.default_rng(self.seed)
    shape = (BATCH, self.T, self.D)

    def normal(*shape):
      return jnp.asarray(rng.standard_normal(shape), self.dtype)

    query_dtype = "float64" if self.dtype == "float64" else "float32"
    arrays = {
      "queries": normal(self.R, self.key_dim or self.D).astype(query_dtype),
      # Sources of different sizes, as deltas and embeddings are.
      "memory": normal(self.S, *shape) * normal(self.S, 1, 1, 1),
    }
    if self.running is not None:
      arrays["running"] = normal(*shape)
    if self.stream:
      arrays["stream"] = normal(*shape)
    if self.null:
      arrays["null"] = normal(self.D).astype(query_dtype)
    return arrays

  def call(self, implementation, arrays, visible, running_visible):
    return depth_attention(
      arrays["queries"],
      arrays["memory"],
      visible=visible,
      running_BxTxD=arrays.get("running"),
      running_visible=running_visible,
      stream_BxTxD=arrays.get("stream"),
      null_D=arrays.get("null"),
      heads=self.heads,
      key_dim=self.key_dim,
      eps=EPS,
      implementation=implementation,
    )

  def sources(self, arrays, visible=None) -> Sources:
    return Sources(
      null_D=arrays.get("null"),
      memory_SxBxTxD=arrays["memory"],
      visible=jnp.int32(self.num_visible if visible is None else visible),
      running_BxTxD=arrays.get("running"),
      running_visible=jnp.asarray(bool(self.running)),
    )


@functools.cache
def value_and_gradients(case: Case, implementation: str):
  """Jitted: (arrays, cotangent, visible, running_visible), all traced."""

  def run(arrays, cotangent, visible, running_visible):
    out, vjp = jax.vjp(
      lambda x: case.call(implementation, x, visible, running_visible), arrays
    )
    return {"out": out, **vjp(cotangent)[0]}

  return quick_jit(run)


def evaluate(case: Case, implementation: str, arrays=None):
  """{"out": mixed_RxBxTxD, name of an input: its gradient}, as float64."""
  arrays = case.arrays() if arrays is None else arrays
  rng = np.random.default_rng(case.seed + 1)
  cotangent = rng.standard_normal((case.R, BATCH, case.T, case.D))
  found = value_and_gradients(shapes_only(case), implementation)(
    arrays,
    jnp.asarray(cotangent, case.dtype),
    jnp.int32(case.num_visible),
    jnp.asarray(bool(case.running)),
  )
  for name, x in found.items():
    assert x.dtype == arrays.get(name, arrays["memory"]).dtype, name
  return {name: np.asarray(x, np.float64) for name, x in found.items()}


def shapes_only(case: Case) -> Case:
  """The case without what is traced, so that programs are shared."""
  running = None if case.running is None else False
  return dataclasses.replace(case, visible=None, running=running, seed=0)


def assert_close(actual, expected, dtype):
  most, all_ = TOLERANCE[dtype]
  assert actual.keys() == expected.keys()
  for name, x in actual.items():
    if not x.size:
      continue
    assert_mostly_close(x, expected[name], most, all_, name)


CASES = [
  # Every S with every D; T and R alternate.
  *(
    Case(S=S, D=D, T=(1, 7)[(i + j) % 2], R=1 + (i + 2 * j) % 3)
    for i, S in enumerate((1, 2, 9, 33))
    for j, D in enumerate((64, 96, 123))
  ),
  Case(S=0, running=True),
  Case(S=0, null=True, R=2, stream=False),
  Case(visible=4, running=True),
  Case(visible=4, running=False),
  Case(visible=0, running=True),
  Case(visible=0, running=False),
  Case(visible=0, running=False, stream=False),
  Case(visible=1, null=True, running=False, stream=False, R=2),
  Case(visible=1, null=True, running=True, stream=False, R=2),
  Case(D=96, heads=4, R=2, running=True, visible=5),
  Case(D=96, heads=3, key_dim=24, R=3, null=True, running=True),
  Case(D=123, key_dim=17, R=2, running=True, null=True),
  Case(D=123, key_dim=1, T=1),
  Case(dtype="bfloat16"),
  Case(dtype="bfloat16", visible=5, running=True, null=True, R=2, heads=2),
  Case(dtype="float64", S=33, D=123, R=2),
  Case(
    **{"dtype": "float64", "D": 96, "heads": 2, "key_dim": 32, "R": 3},
    **{"null": True, "running": True, "visible": 6},
  ),
]


SMOKE = {CASES[5], CASES[-1]}


@pytest.mark.parametrize(
  "case",
  [pytest.param(x, marks=[pytest.mark.smoke] * (x in SMOKE)) for x in CASES],
  ids=str,
)
def test_xla_equals_the_definition(case):
  with precision(case.dtype):
    actual, expected = (evaluate(case, name) for name in ("xla", "reference"))
    assert_close(actual, expected, case.dtype)


def test_xla_is_the_default():
  case = Case()
  arrays = case.arrays()
  default, xla = (
    quick_jit(lambda x, name=name: case.call(name, x, 3, True))(arrays)
    for name in (None, "xla")
  )
  np.testing.assert_array_equal(default, xla)


@pytest.mark.parametrize("heads, key_dim", [(1, None), (2, None), (2, 4)])
def test_the_definition_is_the_equation(heads, key_dim):
  """The formula of the papers, one token at a time."""
  case = Case(
    **{"S": 4, "D": 12, "T": 3, "R": 2, "heads": heads, "key_dim": key_dim},
    **{"null": True, "running": True, "visible": 2, "dtype": "float64"},
  )
  with precision("float64"):
    x = {name: np.asarray(a) for name, a in case.arrays().items()}
    actual = evaluate(case, "reference")["out"]
  size, group, key_group = 12, 12 // heads, (key_dim or 12) // heads
  for r, b, t in np.ndindex(case.R, BATCH, case.T):
    sources = [x["null"], *x["memory"][:2, b, t], x["running"][b, t]]
    keys = [source[size - (key_dim or size) :] for source in sources]
    expected = x["stream"][b, t].copy()
    for h in range(heads):
      part = slice(h * key_group, (h + 1) * key_group)
      logits = [
        x["queries"][r, part] @ key[part] / np.sqrt(np.mean(key**2) + EPS)
        for key in keys
      ]
      alpha = np.exp(logits) / np.exp(logits).sum()
      part = slice(h * group, (h + 1) * group)
      for weight, source in zip(alpha, sources, strict=True):
        expected[part] += weight * source[part]
    np.testing.assert_allclose(actual[r, b, t], expected, rtol=1e-12)


@pytest.mark.parametrize(
  "case",
  [
    Case(S=3, D=6, T=2, R=2, visible=2, running=True, dtype="float64"),
    Case(
      **{"S": 2, "D": 8, "T": 2, "R": 3, "heads": 2, "key_dim": 6},
      **{"null": True, "running": True, "dtype": "float64"},
    ),
  ],
  ids=str,
)
def test_gradients_are_finite_differences(case):
  with precision("float64"):
    function = jax.jit(
      lambda x: case.call("xla", x, case.num_visible, bool(case.running))
    )
    jax.test_util.check_grads(
      function,
      (case.arrays(),),
      order=1,
      modes=["rev"],
      atol=1e-7,
      rtol=1e-7,
      eps=1e-5,
    )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("case", [Case(S=1), Case(S=0, running=True)], ids=str)
def test_one_source_has_weight_one(case, implementation):
  case = dataclasses.replace(case, stream=False, R=2)
  arrays = case.arrays()
  found = evaluate(case, implementation)
  (only,) = arrays["memory"] if case.S else [arrays["running"]]
  np.testing.assert_array_equal(found["out"], np.stack([only, only]))
  weights = depth_attention_weights(
    arrays["queries"], case.sources(arrays), case.heads, EPS
  )
  np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize(
  "case",
  [
    Case(S=1),
    Case(S=1, D=96, R=2),
    Case(S=1, D=123, R=3, stream=False),
    Case(S=1, D=96, T=1, heads=2),
    Case(S=1, dtype="bfloat16", R=2),
    Case(S=9, visible=1, D=96, running=False),
    Case(S=0, running=True, D=96, R=2),
    Case(S=0, null=True, D=123, R=2, running=False),
  ],
  ids=str,
)
def test_one_source_gives_the_query_no_gradient(case):
  arrays = case.arrays()
  rng = np.random.default_rng(1)
  cotangent = rng.standard_normal((case.R, BATCH, case.T, case.D))

  @jax.jit
  def query_gradient(arrays, cotangent, visible, running_visible):
    _, vjp = jax.vjp(
      lambda x: case.call("xla", x, visible, running_visible), arrays
    )
    return vjp(cotangent)[0]["queries"]

  gradient = query_gradient(
    arrays,
    jnp.asarray(cotangent, case.dtype),
    jnp.int32(case.num_visible),
    jnp.asarray(bool(case.running)),
  )
  np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_invisible_slots_have_no_effect_and_no_gradient(implementation):
  case = Case(visible=4, running=True, null=True, R=2)
  arrays = case.arrays()
  found = evaluate(case, implementation, arrays)
  np.testing.assert_array_equal(found["memory"][4:], 0)
  assert (np.abs(found["memory"][:4]).max(axis=(1, 2, 3)) > 0).all()
  garbage = 1e4 * np.random.default_rng(3).standard_normal((9, BATCH, 7, 64))
  memory = jnp.where(
    np.arange(9)[:, None, None, None] < 4, arrays["memory"], garbage
  )
  again = evaluate(case, implementation, arrays | {"memory": memory})
  for name, x in found.items():
    np.testing.assert_array_equal(again[name], x, err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_an_invisible_running_source_has_no_effect(implementation, scale):
  case = Case(visible=4, running=False, R=2)
  arrays = case.arrays()
  found = evaluate(
    case, implementation, arrays | {"running": scale * arrays["running"]}
  )
  np.testing.assert_array_equal(found.pop("running"), 0)
  without = evaluate(
    Case(visible=4, R=2), implementation, arrays_without(arrays)
  )
  for name, x in found.items():
    np.testing.assert_allclose(x, without[name], rtol=1e-6, atol=1e-6)


def arrays_without(arrays):
  return {name: x for name, x in arrays.items() if name != "running"}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
  "case",
  [
    Case(visible=0),
    Case(visible=0, running=False, R=2),
    Case(S=0),
    Case(S=0, running=False, R=2),
    Case(visible=0, dtype="bfloat16"),
  ],
  ids=str,
)
def test_no_visible_source_returns_the_stream(case, implementation):
  arrays = case.arrays()
  found = evaluate(case, implementation)
  stream = np.asarray(arrays["stream"], np.float64)
  np.testing.assert_array_equal(found["out"], np.stack([stream] * case.R))
  np.testing.assert_array_equal(found["queries"], 0)
  np.testing.assert_array_equal(found["memory"], 0)
  without = dataclasses.replace(case, stream=False)
  np.testing.assert_array_equal(evaluate(without, implementation)["out"], 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_zero_queries_give_the_mean(implementation):
  case = Case(visible=5, running=True, null=True, heads=2, dtype="float64")
  with precision("float64"):
    arrays = case.arrays()
    arrays["queries"] = jnp.zeros_like(arrays["queries"])
    out = evaluate(case, implementation, arrays)["out"][0]
    mean = arrays["null"] + arrays["memory"][:5].sum(0) + arrays["running"]
    np.testing.assert_allclose(out, arrays["stream"] + mean / 7, rtol=1e-12)


@pytest.mark.parametrize("visible", [0, 4, 9])
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("null", [True, False])
def test_weights_sum_to_one_over_the_visible(visible, running, null):
  case = Case(visible=visible, running=running, null=null, heads=2, R=2)
  arrays = case.arrays()
  weights = np.asarray(
    depth_attention_weights(arrays["queries"], case.sources(arrays), 2, EPS)
  )
  mask = [True] * null + list(np.arange(9) < visible) + [running]
  assert weights.shape == (2, 2, len(mask), BATCH, 7)
  weights = weights.swapaxes(0, 2)
  assert (weights[mask] > 0).all()
  assert (weights[~np.array(mask)] == 0).all()
  np.testing.assert_allclose(weights.sum(0), float(any(mask)), atol=1e-6)


def test_the_output_is_the_weighted_sum_of_the_sources():
  case = Case(visible=4, running=True, null=True, R=2)
  arrays = case.arrays()
  weights = depth_attention_weights(
    arrays["queries"], case.sources(arrays), 1, EPS
  )[:, 0]
  null = jnp.broadcast_to(arrays["null"], arrays["stream"].shape)
  sources = jnp.concatenate(
    [null[None], arrays["memory"], arrays["running"][None]]
  )
  expected = jnp.einsum("rnbt,nbtd->rbtd", weights, sources) + arrays["stream"]
  out = evaluate(case, "xla")["out"]
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_under_scan_with_a_growing_memory(dtype):
  """As a model uses it: slots are written and become visible step by step."""
  case = Case(S=5, D=64, T=3, R=2, running=True, null=True, dtype=dtype)

  def run(implementation, arrays, starts_at):
    def layer(carry, step):
      memory, stream = carry
      arrays_now = arrays | {"memory": memory, "stream": stream}
      out = case.call(implementation, arrays_now, step, step % 2 == 1)
      delta = jnp.tanh(out[0] - 0.5 * out[1])
      memory = lax.dynamic_update_index_in_dim(memory, delta, step, 0)
      return (memory, stream + delta), out

    (memory, stream), outs = lax.scan(
      layer, (arrays["memory"], arrays["stream"]), starts_at + jnp.arange(4)
    )
    return sum(
      jnp.mean(
        jnp.sin(x.astype(jnp.float32 if dtype != "float64" else x.dtype)) ** 2
      )
      for x in (memory, stream, outs)
    )

  with precision(dtype):
    arrays = case.arrays()
    found = []
    for name in ("xla", "reference"):
      function = quick_jit(jax.value_and_grad(functools.partial(run, name)))
      value, gradients = function(arrays, jnp.int32(1))
      found.append({"value": value, **gradients})
    found = [
      {name: np.asarray(x, np.float64) * 1e2 for name, x in tree.items()}
      for tree in found
    ]
    assert_close(*found, dtype)


@functools.cache
def jitted_weights():
  case = Case(S=6, D=8, T=2, R=2, dtype="float64")
  return case, jax.jit(
    lambda queries, memory, visible: depth_attention_weights(
      queries, case.sources({"memory": memory}, visible), 1, 1e-30
    )[:, 0]
  )


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(6)), st.integers(0, 2**32 - 1))
def test_permuting_sources_permutes_weights(order, seed):
  with precision("float64"):
    case, weights = jitted_weights()
    arrays = dataclasses.replace(case, seed=seed).arrays()
    queries, memory = arrays["queries"], arrays["memory"]
    expected = weights(queries, memory, 6)[:, np.array(order)]
    actual = weights(queries, memory[np.array(order)], 6)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
  st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=6),
  st.integers(1, 6),
  st.integers(0, 2**32 - 1),
)
def test_the_size_of_a_source_does_not_matter(sizes, visible, seed):
  with precision("float64"):
    case, weights = jitted_weights()
    arrays = dataclasses.replace(case, seed=seed).arrays()
    queries, memory = arrays["queries"], arrays["memory"]
    scaled = memory * np.reshape(sizes, (-1, 1, 1, 1))
    np.testing.assert_allclose(
      weights(queries, scaled, visible),
      weights(queries, memory, visible),
      rtol=1e-9,
    )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_tokens_do_not_mix(implementation):
  case = Case(S=3, running=True, null=True, R=2)
  arrays = case.arrays()
  other = dataclasses.replace(case, seed=5).arrays()
  mixed = {
    name: other[name].at[..., :4, :].set(arrays[name][..., :4, :])
    if name in ("memory", "running", "stream")
    else arrays[name]
    for name in arrays
  }
  out, changed = (
    evaluate(case, implementation, x)["out"] for x in (arrays, mixed)
  )
  np.testing.assert_array_equal(out[:, :, :4], changed[:, :, :4])
  assert (out[:, :, 4:] != changed[:, :, 4:]).any(-1).all()


def call(queries=(1, 8), memory=(3, 2, 4, 8), **options):
  shapes = {
    name: jnp.zeros(shape) if isinstance(shape, tuple) else shape
    for name, shape in options.items()
  }
  return depth_attention(
    jnp.zeros(queries), jnp.zeros(memory), visible=3, eps=EPS, **shapes
  )


@pytest.mark.parametrize(
  "options, message",
  [
    ({"implementation": "xls"}, "did you mean 'xla'"),
    (
      {"implementation": "mosaic"},
      "interpret, interpret_triton, pallas_tpu, pallas_triton, reference",
    ),
    ({"implementation": "pallas_tpu"}, "it runs on tpu, the platform is cpu"),
    ({"implementation": "pallas_triton"}, "on gpu, the platform is cpu"),
    ({"memory": (3, 4, 8)}, r"\(3, 4, 8\)"),
    ({"queries": (8,)}, r"\(8,\)"),
    ({"queries": (1, 7)}, "size 7 .* size 8"),
    ({"queries": (1, 8), "key_dim": 4}, "size 8 .* size 4"),
    ({"queries": (1, 9), "key_dim": 9}, "size 9 .* width 8"),
    ({"heads": 3}, "width 8 .* heads 3"),
    ({"queries": (1, 3), "key_dim": 3, "heads": 2}, "key size 3 .* heads 2"),
    ({"running_BxTxD": (2, 4, 7)}, r"running .*\(2, 4, 7\).*\(2, 4, 8\)"),
    ({"stream_BxTxD": (4, 8)}, r"stream .*\(4, 8\).*\(2, 4, 8\)"),
    ({"null_D": (7,)}, r"null .*\(7,\).*\(8,\)"),
  ],
)
def test_what_does_not_fit_raises(options, message):
  with pytest.raises(ConfigError, match=message):
    call(**options)
