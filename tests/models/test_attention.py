"""Attention back ends: all equal the definition, or say why they cannot."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.config import ATTENTION, ConfigError
from deltajax.models import attention
from deltajax.models.attention import (
  AttentionCase,
  choose_attention,
  dot_product_attention,
  splash_tile,
)
from deltajax.models.transformer import TransformerLM
from deltajax.routing.sharding import Sharding, use_sharding
from deltajax.training.mesh import RULES
from tests.helpers import (
  assert_trees_close,
  quick_jit,
  random_params,
  random_tokens,
  relative_error,
  tiny_config,
)

CASE = AttentionCase(256, 64, "bfloat16", "int32")


def inputs(length=128, heads=(4, 2), head_dim=8, dtype="float32", batch=2):
  """Query, key and value."""
  rng = np.random.default_rng(length + heads[1])
  num_heads, num_kv_heads = heads
  return tuple(
    jnp.asarray(rng.standard_normal((batch, length, n, head_dim)), dtype)
    for n in (num_heads, num_kv_heads, num_kv_heads)
  )


def documents(*lengths, batch=2) -> np.ndarray:
  """Segment ids of rows with documents of these lengths, in two orders."""
  rows = [np.repeat(np.arange(len(x)), x) for x in (lengths, lengths[::-1])]
  return np.stack((rows * batch)[:batch]).astype(np.int32)


@functools.cache
def function(implementation):
  return quick_jit(
    functools.partial(dot_product_attention, implementation=implementation)
  )


@functools.cache
def gradient(implementation):
  """Of a sum that weighs every output differently."""

  def loss(arrays, segment_ids):
    mixed = dot_product_attention(
      *arrays, segment_ids, implementation=implementation
    )
    return jnp.sum(jnp.sin(jnp.arange(mixed.size).reshape(mixed.shape)) * mixed)

  return quick_jit(jax.grad(loss))


def oracle(query, key, value, segment_ids) -> np.ndarray:
  """One token and one head at a time, in float64."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  batch, length, num_heads, head_dim = query.shape
  group = num_heads // key.shape[2]
  mixed = np.zeros(query.shape)
  for b, t, h in np.ndindex(batch, length, num_heads):
    seen = [
      s for s in range(t + 1)
      if segment_ids is None or segment_ids[b, s] == segment_ids[b, t]
    ]  # fmt: skip
    logits = key[b, seen, h // group] @ query[b, t, h] / np.sqrt(head_dim)
    weights = np.exp(logits - logits.max())
    mixed[b, t, h] = weights / weights.sum() @ value[b, seen, h // group]
  return mixed


def mostly_close(actual, expected, all_within: float) -> None:
  """All within a bound, 99% within a fifth of it, of the largest value."""
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  errors = np.abs(actual - expected) / np.abs(expected).max()
  assert errors.max() < all_within
  assert np.quantile(errors, 0.99) < all_within / 5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(
  "length, segment_ids",
  [
    (13, None),
    (13, documents(1, 7, 5)),
    (13, np.array([[0, 1] * 6 + [0], [5] * 13])),  # not contiguous; one
    (1, None),
    (1, documents(1)),
  ],
)
def test_xla_equals_the_oracle(heads, length, segment_ids):
  arrays = inputs(length, heads)
  mixed = function("xla")(*arrays, segment_ids)
  expected = oracle(*arrays, segment_ids)
  assert relative_error(mixed, expected) < 1e-6


def test_xla_keeps_float64():
  with jax.enable_x64(True):
    arrays = inputs(13, dtype="float64")
    mixed = function("xla")(*arrays, None)
    assert mixed.dtype == jnp.float64
    assert relative_error(mixed, oracle(*arrays, None)) < 1e-13


@pytest.mark.smoke
@pytest.mark.parametrize(
  "length, heads, lengths",
  [
    (128, (4, 2), (37, 80, 11)),
    (128, (2, 2), None),
    (256, (2, 1), (128, 1, 127)),
    (256, (2, 2), (256,)),
    (640, (2, 1), (600, 40)),  # five tiles a side
  ],
)
@pytest.mark.parametrize(
  "dtype, within", [("float32", 1e-5), ("bfloat16", 4e-2)]
)
def test_splash_equals_xla(length, heads, lengths, dtype, within):
  segment_ids = None if lengths is None else documents(*lengths)
  arrays = inputs(length, heads, dtype=dtype)
  exact = tuple(x.astype("float32") for x in arrays)
  mixed = function("splash_interpret")(*arrays, segment_ids)
  assert mixed.dtype == dtype
  mostly_close(mixed, function("xla")(*exact, segment_ids), within)
  grads = gradient("splash_interpret")(arrays, segment_ids)
  expected = gradient("xla")(exact, segment_ids)
  for grad, exact_grad in zip(grads, expected, strict=True):
    assert grad.dtype == dtype
    mostly_close(grad, exact_grad, within)


def test_splash_tiles_divide_the_length():
  for length in range(128, 4097, 128):
    tile = splash_tile(length)
    assert length % tile == 0
    assert tile % 128 == 0
  assert splash_tile(4096) == 512


@pytest.mark.parametrize("implementation", ["xla", "splash_interpret"])
def test_packed_documents_are_independent(implementation):
  """Bit for bit, in values and in gradients."""
  segment_ids = np.repeat(np.arange(2), (150, 106))[None].astype(np.int32)
  arrays = inputs(256, batch=1)
  changed = tuple(x.at[:, :150].multiply(-3.0) for x in arrays)
  run, grad = function(implementation), gradient(implementation)
  before, after = (run(*x, segment_ids) for x in (arrays, changed))
  np.testing.assert_array_equal(before[:, 150:], after[:, 150:])
  assert not np.array_equal(before[:, :150], after[:, :150])
  for x, y in zip(
    grad(arrays, segment_ids), grad(changed, segment_ids), strict=True
  ):
    np.testing.assert_array_equal(x[:, 150:], y[:, 150:])


def test_attention_is_causal_under_splash():
  """Changing later tokens leaves earlier outputs bit-equal."""
  arrays = inputs(256, batch=1)
  changed = tuple(x.at[:, 150:].multiply(-3.0) for x in arrays)
  run = function("splash_interpret")
  before, after = run(*arrays, None), run(*changed, None)
  np.testing.assert_array_equal(before[:, :150], after[:, :150])


def choose_on_its_platform(name: str, case):
  platform = attention.IMPLEMENTATIONS[name].platform
  return choose_attention(case, name, platform=platform)


def refused(name: str, **changes) -> str:
  """The reason, which an explicit choice must raise."""
  case = dataclasses.replace(CASE, **changes)
  reason = attention.IMPLEMENTATIONS[name].refusal(case)
  with pytest.raises(ConfigError) as error:
    choose_on_its_platform(name, case)
  assert str(error.value) == f"attention {name!r} cannot serve: {reason}."
  return reason


@pytest.mark.parametrize("name", ["splash", "splash_interpret"])
def test_splash_says_why_not(name):
  assert choose_on_its_platform(name, CASE) == (name, {})
  assert "multiple of 128, it is 200" in refused(name, length=200)
  assert "multiple of 128, it is 1" in refused(name, length=1)
  assert "the dtype is float16" in refused(name, dtype="float16")
  assert "the dtype is float64" in refused(name, dtype="float64")
  assert "at most 256, it is 264" in refused(name, head_dim=264)
  assert "dtype is uint32" in refused(name, segment_dtype="uint32")


def test_cudnn_says_why_not(monkeypatch):
  monkeypatch.setattr(attention, "has_cuda_plugin", lambda: False)
  assert "no CUDA plug-in" in refused("cudnn")
  monkeypatch.setattr(attention, "has_cuda_plugin", lambda: True)
  t4 = refused("cudnn", dtype="float16", compute_capability="7.5")
  assert "8.0, this GPU has 7.5" in t4
  amd = refused("cudnn", compute_capability="gfx942")
  assert "NVIDIA GPU, this one is gfx942" in amd
  for capability, widest in ((None, 128), ("8.0", 128), ("9.0", 256)):
    gpu = {"compute_capability": capability}
    served = dataclasses.replace(CASE, **gpu)
    assert choose_on_its_platform("cudnn", served) == ("cudnn", {})
    reason = refused("cudnn", head_dim=widest + 8, **gpu)
    assert f"at most {widest}, it is {widest + 8}" in reason
  blackwell = {"compute_capability": "10.0"}
  assert "multiple of 8" in refused("cudnn", head_dim=60, **blackwell)
  assert "dtype is float32" in refused("cudnn", dtype="float32")
  assert "dtype is float64" in refused("cudnn", dtype="float64")
  assert "even T, it is 255" in refused("cudnn", length=255)
  odd = dataclasses.replace(CASE, length=255, segment_dtype=None)
  assert choose_on_its_platform("cudnn", odd) == ("cudnn", {})


def test_the_gpu_that_is_traced_for_counts(monkeypatch):
  """Not what this machine has, which may be none."""
  monkeypatch.setattr(attention, "has_cuda_plugin", lambda: True)
  t4 = mock.Mock(platform="cuda", compute_capability="7.5")
  mesh = mock.Mock(devices=np.array([t4]), shape={"context": 2})
  with use_sharding(Sharding(mesh, RULES)):
    case = AttentionCase.traced(256, 64, "bfloat16", "int32")
    choice = choose_attention(case)
  assert case == dataclasses.replace(CASE, context=2, compute_capability="7.5")
  assert choice.name == "xla"
  assert "this GPU has 7.5" in choice.rejected["cudnn"]


def test_automatic_choice_names_what_it_rejects(monkeypatch):
  assert choose_attention(CASE) == (
    "xla",
    {
      "splash": "it runs on tpu, the platform is cpu",
      "cudnn": "it runs on gpu, the platform is cpu",
    },
  )
  monkeypatch.setattr(attention, "has_cuda_plugin", lambda: True)
  assert choose_attention(CASE, platform="tpu") == ("splash", {})
  assert choose_attention(CASE, platform="gpu").name == "cudnn"
  short = dataclasses.replace(CASE, length=100, dtype="float32")
  on_tpu = choose_attention(short, platform="tpu")
  assert on_tpu.name == "xla"
  assert on_tpu.rejected["splash"] == "T must be a multiple of 128, it is 100"
  on_gpu = choose_attention(short, platform="gpu")
  assert on_gpu.name == "xla"
  assert "the dtype is float32" in on_gpu.rejected["cudnn"]
  mixed = function(None)(*inputs(13), None)
  np.testing.assert_array_equal(mixed, function("xla")(*inputs(13), None))


def test_calls_raise_what_the_choice_raises():
  with pytest.raises(ConfigError, match=r"multiple of 128, it is 13"):
    dot_product_attention(*inputs(13), implementation="splash_interpret")
  with pytest.raises(ConfigError, match=r"on gpu, the platform is cpu"):
    dot_product_attention(*inputs(13), implementation="cudnn")
  with pytest.raises(ConfigError, match=r"did you mean 'splash'"):
    dot_product_attention(*inputs(13), implementation="splas")


def test_inputs_that_disagree_raise():
  query, key, value = inputs(13)
  ids = np.zeros((2, 13), np.int32)
  for arguments, message in (
    ((query, key[:, :12], value[:, :12]), "must agree in all but"),
    ((query, key, value[:, :12]), "of one shape"),
    ((query[0], key, value), "queries [B, T, H, C]"),
    ((query[:, :, :3], key, value), "3 query heads are not divisible by 2"),
    ((query, key.astype("bfloat16"), value), "must have one dtype"),
    ((query, key, value, ids[:, :12]), "need (2, 13)"),
    ((query, key, value, ids.astype("float32")), "must be integers"),
  ):
    with pytest.raises(ConfigError) as error:
      dot_product_attention(*arguments)
    assert message in str(error.value)


def test_config_knows_the_names():
  assert set(ATTENTION) == attention.IMPLEMENTATIONS.keys()
  for name in ATTENTION:
    assert tiny_config(attention=name).attention == name
  with pytest.raises(ConfigError, match=r"model\.attention 'flash'"):
    tiny_config(attention="flash")


def test_model_passes_the_implementation_on():
  xla, splash = (
    tiny_config(
      num_layers=2,
      num_blocks=2,
      dtype="float32",
      param_dtype="float32",
      attention=name,
    )
    for name in ("xla", "splash_interpret")
  )
  params = random_params(splash)  # shaped at a length that splash refuses
  tokens = random_tokens(xla, batch=1, length=128)
  segment_ids = documents(100, 28, batch=1)

  def loss(params, config):
    output = TransformerLM(config).apply(
      {"params": params}, tokens, segment_ids=segment_ids
    )
    return jnp.sum(jnp.square(output.logits_BxTxV))

  def value_and_grad(config):
    run = functools.partial(loss, config=config)
    return quick_jit(jax.value_and_grad(run))(params)

  (value, grads), (expected, expected_grads) = map(
    value_and_grad, (splash, xla)
  )
  assert relative_error(value, expected) < 1e-5
  assert_trees_close(grads, expected_grads, 1e-4)
  with pytest.raises(ConfigError, match=r"multiple of 128, it is 100"):
    jax.eval_shape(
      TransformerLM(splash).apply, {"params": params}, tokens[:, :100]
    )


@pytest.mark.parametrize("lengths", [None, (100, 28)])
def test_cudnn_lowers_for_cuda(monkeypatch, lengths):
  """What it computes needs a GPU; that the mask reaches cuDNN does not."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
  segment_ids = None if lengths is None else documents(*lengths)

  def loss(arrays, segment_ids):
    mixed = attention.IMPLEMENTATIONS["cudnn"].run(*arrays, segment_ids)
    return jnp.sum(mixed.astype(jnp.float32))

  arrays = inputs(128, head_dim=64, dtype="bfloat16")
  trace = jax.jit(jax.value_and_grad(loss)).trace(arrays, segment_ids)
  text = trace.lower(lowering_platforms=("cuda",)).as_text()
  kind = "Softmax" if lengths is None else "ScaleBiasSoftmax"
  assert f"__cudnn$fmha{kind}(" in text
  assert f"__cudnn$fmha{kind}Backward(" in text
  assert text.count("CAUSAL") == 2
  assert "PADDING" not in text


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: make libtpu",
)
def test_splash_compiles_for_tpu():
  """Ahead of time, without a TPU, in a process of its own."""
  script = """
    import jax
    from jax.experimental import topologies
    import jax.numpy as jnp
    from deltajax.models.attention import IMPLEMENTATIONS

    topology = topologies.get_topology_desc(
      platform="tpu", topology_name="v5e:2x2"
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def loss(arrays, ids):
      mixed = IMPLEMENTATIONS["splash"].run(*arrays, ids)
      return jnp.sum(jnp.square(mixed.astype(jnp.float32)))

    def compile(length, heads, head_dim, dtype, segmented):
      arrays = [
        jax.ShapeDtypeStruct((2, length, n, head_dim), dtype, sharding=device)
        for n in (heads[0], heads[1], heads[1])
      ]
      ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=device)
      run = jax.jit(jax.value_and_grad(loss))
      program = run.lower(arrays, ids if segmented else None).compile()
      suffix = "_segmented" if segmented else ""
      for phase in ("fwd", "dq", "dkv"):
        assert f"splash_mha_{phase}{suffix}" in program.as_text(), phase

    compile(128, (2, 2), 64, "bfloat16", False)
    compile(1024, (4, 2), 128, "bfloat16", True)
    compile(512, (2, 1), 256, "float32", True)
    print("compiled")
  """
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(script)],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.stdout.endswith("compiled\n"), result.stderr[-3000:]


def test_splash_needs_the_sequence_whole():
  split = dataclasses.replace(CASE, context=2)
  assert (
    "T must be whole, it is split over context 2"
    in (choose_attention(split, platform="tpu").rejected["splash"])
  )
  with pytest.raises(ConfigError, match="split over context 2"):
    choose_attention(split, "splash", platform="tpu")


def test_splash_on_a_mesh_equals_xla_on_one_device():
  script = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from deltajax.models.attention import dot_product_attention
    from deltajax.routing.sharding import Sharding, use_sharding
    from deltajax.training.mesh import RULES

    mesh = jax.make_mesh(
      (2, 2, 2, 1), ("data", "fsdp", "tensor", "context"),
      axis_types=(jax.sharding.AxisType.Auto,) * 4,
    )
    sharding = Sharding(mesh, RULES)
    rng = np.random.default_rng(0)
    arrays = [
      jnp.asarray(rng.standard_normal((4, 128, n, 64)), jnp.float32)
      for n in (4, 2, 2)
    ]
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (4, 128))), jnp.int32)

    def loss(arrays, ids, name):
      mixed = dot_product_attention(*arrays, ids, implementation=name)
      return jnp.sum(jnp.sin(mixed)), mixed

    run = jax.jit(
      jax.value_and_grad(loss, has_aux=True), static_argnames="name"
    )
    expected = run(arrays, ids, name="xla")
    with use_sharding(sharding):
      found = run(
        [jax.device_put(x, sharding.named("batch", None, axis, None))
         for x, axis in zip(arrays, ("heads", "kv_heads", "kv_heads"))],
        jax.device_put(ids, sharding.named("batch", None)),
        name="splash_interpret",
      )
    assert found[0][1].sharding.shard_shape((4, 128, 4, 64)) == (1, 128, 2, 64)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found)):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    print("equal")
  """
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(script)],
    env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.stdout.endswith("equal\n"), result.stderr[-3000:]


def test_a_name_is_refused_on_another_platform():
  with pytest.raises(ConfigError, match="the platform is cpu"):
    choose_attention(CASE, "splash")
  for name, platform in (("splash", "cpu"), ("cudnn", "tpu")):
    with pytest.raises(ConfigError, match=f"the platform is {platform}"):
      choose_attention(CASE, name, platform=platform)
  assert choose_attention(CASE, "splash", platform="tpu").name == "splash"
