"""The decoder: sizes, independence of tokens, scan, gradients and errors."""

import functools
import re

from flax import linen as nn, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.config import ConfigError, ModelConfig, RoutingConfig
from deltajax.models.layers import RMSNorm, Rotation
from deltajax.models.transformer import DecoderLayer, TransformerLM
from deltajax.routing import build_schedule, DepthRouter, VARIANTS
from deltajax.routing.memory import DepthState
from tests.helpers import (
  assert_trees_close,
  initial_params,
  initial_variables,
  logits_of,
  precision,
  quick_jit,
  random_params,
  random_tokens,
  relative_error,
  shapes,
  tiny_config,
)
from tests.routing import oracle

FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}


# --- Sizes -----------------------------------------------------------------


def paper(layers, width, heads, kv_heads, head_dim, mlp, vocab=151_936, **more):
  return ModelConfig(
    **{"vocab_size": vocab, "width": width, "num_layers": layers},
    **{"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim},
    mlp_width=mlp,
    routing=RoutingConfig(**more),
  )


def count(config):
  return sum(x.size for x in jax.tree.leaves(shapes(config)))


@pytest.mark.parametrize(
  "size, millions",
  [
    ((12, 768, 12, 4, 64, 3072), 220.5),
    ((24, 1024, 16, 8, 64, 4096), 533.1),
    ((36, 1280, 20, 4, 64, 5120), 1043.9),
    ((36, 4096, 32, 8, 128, 12288), 7568.4),
    # Role-decoupled AttnRes; inferred shapes that give the published counts.
    ((16, 576, 9, 9, 64, 5 * 576, 32_768), 119.7),
    ((24, 832, 13, 13, 64, 5 * 832, 32_768), 342.9),
  ],
)
def test_parameters_of_the_papers_models(size, millions):
  # The papers' numbers are cut, not rounded: 119.755 is given as 119.7.
  tenths = count(paper(*size, variant="standard")) // 100_000
  assert tenths == round(10 * millions)


def test_parameters_of_routing_at_7_6b():
  size = (36, 4096, 32, 8, 128, 12288)
  standard = count(paper(*size, variant="standard"))
  assert count(paper(*size, variant="delta_block")) - standard == 589_824
  # A final read, and one more query in each attention sublayer.
  attnres = count(paper(*size, variant="attnres_block")) - standard
  assert attnres == 589_824 + 2 * 4096
  roles = count(paper(*size, variant="rd_attnres")) - standard
  assert roles == attnres + 36 * 4096
  assert count(paper(*size, variant="embedding_skip")) == standard
  scaled = count(paper(*size, variant="embedding_skip_scaled"))
  assert scaled == standard + 72


@pytest.mark.parametrize(
  "options, extra",
  [
    ({"heads": 2}, 0),
    ({"key_dim": 6}, -12 * 2 * 10),
    ({"gate": "scalar"}, 12),
    ({"null_source": True}, 12 * 16),
  ],
  ids=str,
)
def test_parameters_of_options(options, extra):
  plain = count(tiny_config("delta_block"))
  assert count(tiny_config("delta_block", **options)) == plain + extra


def test_untied_models_have_a_head():
  tied, untied = tiny_config(), tiny_config(tie_embeddings=False)
  assert count(untied) == count(tied) + 41 * 16
  assert shapes(untied)["head"].shape == (16, 41)


# --- Parameters ------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_names_its_axes(variant):
  row = VARIANTS[variant]
  options = {"null_source": True} if row.learned else {}
  if row.additive and (row.learned or row.embedding_source):
    options["gate"] = "scalar"
  config = tiny_config(variant, tie_embeddings=False, **options, **FLOAT32)
  variables = jax.eval_shape(
    TransformerLM(config).init,
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, 2), jnp.int32),
  )
  specs = traverse_util.flatten_dict(nn.get_partition_spec(variables)["params"])
  leaves = traverse_util.flatten_dict(nn.meta.unbox(variables)["params"])
  assert specs.keys() == leaves.keys()
  for path, spec in specs.items():
    assert len(spec) == leaves[path].ndim, path
    assert all(isinstance(axis, str) for axis in spec), path
    assert len(set(spec)) == len(spec), path
    assert (spec[0:1] == ("layers",)) == (path[0] == "layers"), path
    assert "layers" not in spec[1:], path
    if path[0] == "layers":
      assert leaves[path].shape[0] == config.num_layers
  assert tuple(specs["embedding",]) == ("vocab", "embed")
  kernel = tuple(specs["layers", "attention", "query", "kernel"])
  assert kernel == ("layers", "embed", "heads", "head_dim")


@functools.cache
def initial(variant):
  options = {"tie_embeddings": False, "num_layers": 3} | FLOAT32
  return traverse_util.flatten_dict(
    initial_params(tiny_config(variant, **options))
  )


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "standard"])
def test_the_same_key_gives_the_same_shared_parameters(variant):
  standard, params = initial("standard"), initial(variant)
  assert standard.keys() <= params.keys()
  for path, x in standard.items():
    np.testing.assert_array_equal(params[path], x, err_msg="/".join(path))
  for path in params.keys() - standard.keys():
    value = 1 if path[-1] == "key_norm" else 0
    assert (params[path] == value).all(), path


def test_initial_values():
  options = {"gate": "sigmoid", "null_source": True, "query_init_std": 0.5}
  config = tiny_config("rd_delta_block", num_layers=4, **options, **FLOAT32)
  params = initial_params(config)
  router = params["layers"]["attention_router"]
  assert (router["gate"] == -2).all()
  assert (router["null_source"] == 0).all()
  assert 0.4 < router["query"].std() < 0.6
  kernel = params["layers"]["mlp"]["up"]["kernel"]
  assert 0.018 < kernel.std() < 0.022
  for stacked in (kernel, router["query"]):  # layers differ
    assert len({x.tobytes() for x in stacked}) == 4
  assert not np.array_equal(kernel, params["layers"]["mlp"]["gate"]["kernel"])
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_parameters_stay_float32_and_logits_too_in_bfloat16():
  config = tiny_config(dtype="bfloat16", param_dtype="float32")
  variables = initial_variables(config)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(variables))
  output = jax.eval_shape(
    TransformerLM(config).apply, variables, random_tokens(config)
  )
  assert output.logits_BxTxV.dtype == jnp.float32
  assert output.hidden_BxTxD.dtype == jnp.bfloat16


# --- Tokens see the past of their own document, and nothing else -----------


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_do_not_matter(variant):
  config = tiny_config(variant)
  params = random_params(config)
  tokens = random_tokens(config)
  other = (tokens + 1 + random_tokens(config, seed=1) % 40) % 41
  assert (other != tokens).all()
  before = logits_of(config, params, tokens)
  for t in (1, 4, 8):  # tokens from t on change
    changed = np.concatenate([tokens[:, :t], other[:, t:]], axis=1)
    after = logits_of(config, params, changed)
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    assert (after[:, t:] != before[:, t:]).any(-1).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_do_not_see_each_other(variant):
  config = tiny_config(variant)
  params = random_params(config)
  tokens = random_tokens(config)
  segment_ids = np.array([[1] * 4 + [2] * 5, [1] * 6 + [2] * 3])
  positions = np.array([[*range(4), *range(5)], [*range(6), *range(3)]])
  second = segment_ids == 2
  before = logits_of(config, params, tokens, segment_ids, positions)
  changed = np.where(second, tokens, (tokens + 7) % 41).astype(np.int32)
  after = logits_of(config, params, changed, segment_ids, positions)
  np.testing.assert_array_equal(after[second], before[second])
  assert (after[~second] != before[~second]).any(-1).all()
  # The second document alone, at the start of a row.
  alone = np.zeros_like(tokens)
  alone[0, :5], alone[1, :3] = tokens[0, 4:], tokens[1, 6:]
  single = logits_of(config, params, alone)
  np.testing.assert_allclose(single[0, :5], before[0, 4:], atol=1e-10)
  np.testing.assert_allclose(single[1, :3], before[1, 6:], atol=1e-10)


def test_positions_and_segments_matter():
  config = tiny_config()
  params, tokens = random_params(config), random_tokens(config)
  plain = logits_of(config, params, tokens)
  positions = np.tile(np.arange(9), (2, 1))
  ones = np.ones_like(tokens)
  same = logits_of(config, params, tokens, ones, positions)
  np.testing.assert_allclose(same, plain, atol=1e-10)
  # Rotary embeddings are relative.
  moved = logits_of(config, params, tokens, None, positions + 5)
  np.testing.assert_allclose(moved, plain, atol=1e-8)
  spread = logits_of(config, params, tokens, None, 3 * positions)
  assert relative_error(spread, plain) > 1e-2


@functools.cache
def deep_gradient(variant):
  """(config, params, tokens, cotangent -> gradients) of 32 layers in bf16."""
  config = tiny_config(
    **{"variant": variant, "num_layers": 32, "num_blocks": 8},
    **{"dtype": "bfloat16", "param_dtype": "float32", "tie_embeddings": False},
  )
  model = TransformerLM(config)
  tokens = np.arange(8, dtype=np.int32)[None] + 3

  @quick_jit
  def gradient(params, cotangent):
    out, vjp = jax.vjp(
      lambda x: model.apply({"params": x}, tokens).logits_BxTxV, params
    )
    return out, vjp(cotangent)[0]

  return config, random_params(config), tokens[0], gradient


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_32_layers_in_bfloat16(variant):
  config, params, _, gradient = deep_gradient(variant)
  rng = np.random.default_rng(0)
  cotangent = rng.standard_normal((1, 8, config.vocab_size)).astype("float32")
  logits, grads = gradient(params, cotangent)
  assert np.isfinite(logits).all()
  flat = traverse_util.flatten_dict(jax.tree.map(np.asarray, grads))
  schedule = build_schedule(config.routing, config.num_layers)
  for path, x in flat.items():
    assert np.isfinite(x).all(), path
    # Every layer learns, unless what it reads is a single source.
    layers = x if path[0] == "layers" else x[None]
    moving = np.array([np.abs(y).max() > 0 for y in layers])
    if path[-1] in ("query", "key_norm") and path[-2].endswith("_router"):
      offset = 0 if "attention_router" in path else 1
      sublayers = [2 * i + offset for i in range(config.num_layers)]
      if path[0] != "layers":
        sublayers = [None]
      several = [len(schedule.sources(s)) > 1 for s in sublayers]
      assert moving[several].all(), path
    else:
      assert moving.all(), path


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_embeddings_have_no_gradient(variant):
  """Every token occurs once, so that a row of the embedding is a position."""
  config, params, tokens, gradient = deep_gradient(variant)
  for t in (0, 4):
    cotangent = np.zeros((1, 8, config.vocab_size), np.float32)
    cotangent[:, t] = np.random.default_rng(t).standard_normal(41)
    rows = np.asarray(gradient(params, cotangent)[1]["embedding"])
    np.testing.assert_array_equal(rows[tokens[t + 1 :]], 0)
    assert (np.abs(rows[tokens[: t + 1]]).max(axis=1) > 0).all()


# --- One scanned layer -----------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_scan_equals_layers_by_hand(variant):
  config = tiny_config(variant)
  row = VARIANTS[variant]
  schedule = build_schedule(config.routing, config.num_layers)
  params, tokens = random_params(config), random_tokens(config)
  expected = logits_of(config, params, tokens)

  with precision("float64"):
    rotation = Rotation.create(jnp.tile(jnp.arange(9), (2, 1)), config)
    layer = quick_jit(
      lambda params, state, steps: DecoderLayer(config).apply(
        {"params": params}, state, steps, rotation, None
      )[0]
    )
    state = DepthState.create(
      jnp.asarray(params["embedding"])[tokens], schedule
    )
    for i in range(config.num_layers):
      both = (schedule.step(2 * i), schedule.step(2 * i + 1))
      state = layer(
        jax.tree.map(lambda x, i=i: x[i], params["layers"]),
        state,
        jax.tree.map(lambda *x: jnp.stack(x), *both),
      )
    final = state.stream_BxTxD
    if schedule.final is not None:
      router = DepthRouter(
        config.routing, row.single_role, config.width, config.norm_eps
      )
      (final,) = quick_jit(router.apply)(
        {"params": params["final_router"]}, state, schedule.final
      )
    hidden = RMSNorm(config.norm_eps).apply(
      {"params": params["final_norm"]}, final
    )
    actual = hidden @ params["embedding"].T
  assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("variant", ["delta_block", "rd_attnres"])
def test_remat_changes_nothing(variant):
  found = []
  for remat in ("none", "full"):
    config = tiny_config(variant, remat=remat)
    model, tokens = TransformerLM(config), random_tokens(config)

    def loss(params, model=model, tokens=tokens):
      logits = model.apply({"params": params}, tokens).logits_BxTxV
      return jnp.mean(jnp.square(jax.nn.log_softmax(logits)))

    with precision("float64"):
      step = quick_jit(jax.value_and_grad(loss))
      text = step.lower(random_params(config)).as_text()
      value, grads = step(random_params(config))
    found.append((value, jax.tree.map(np.asarray, grads), len(text)))
  (value, grads, size), (value_full, grads_full, size_full) = found
  assert relative_error(value_full, value) < 1e-13
  assert_trees_close(grads_full, grads, 1e-11)
  assert size_full != size  # something is recomputed


@pytest.mark.parametrize("variant", ["delta_block", "attnres_full"])
def test_the_program_does_not_grow_with_depth(variant):
  sizes = []
  for layers in (4, 24):
    config = tiny_config(variant, num_layers=layers, num_blocks=4, **FLOAT32)
    model, tokens = TransformerLM(config), random_tokens(config)

    def loss(params, model=model, tokens=tokens):
      return model.apply({"params": params}, tokens).logits_BxTxV.mean()

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(shapes(config)))
    sizes.append(len(re.sub(r"\d+", "", text)))
  assert abs(sizes[1] / sizes[0] - 1) < 0.05


# --- Captured routing weights ----------------------------------------------


@pytest.mark.parametrize(
  "variant, options",
  [
    *((variant, {}) for variant in VARIANTS),
    ("rd_delta_block", {"null_source": True, "heads": 2}),
    ("attnres_block", {"null_source": True, "key_dim": 8, "heads": 4}),
  ],
)
def test_captured_weights(variant, options):
  config = tiny_config(variant, **options)
  null, heads = config.routing.null_source, config.routing.heads
  model = TransformerLM(config)
  params, tokens = random_params(config), random_tokens(config)
  schedule = build_schedule(config.routing, config.num_layers)

  @quick_jit
  def capture(params, tokens):
    output, captured = model.apply(
      {"params": params}, tokens, mutable="routing"
    )
    return output.logits_BxTxV, captured["routing"]

  with precision(config.dtype):
    logits, captured = capture(params, tokens)
  assert relative_error(logits, logits_of(config, params, tokens)) < 1e-12
  expected = []
  oracle.model_logits(config, params, tokens, weights=expected)

  reads = {}
  for name, offset in (("attention_router", 0), ("mlp_router", 1)):
    weights_LxRxHxNxBxT = np.asarray(captured["layers"][name]["weights"])
    assert len(weights_LxRxHxNxBxT) == config.num_layers
    for i, weights in enumerate(weights_LxRxHxNxBxT):
      reads[2 * i + offset] = weights
  assert ("final_router" in captured) == (schedule.final is not None)
  if schedule.final is not None:
    reads[None] = np.asarray(captured["final_router"]["weights"])

  for s, weights_RxHxNxBxT in reads.items():
    roles = VARIANTS[variant].roles
    is_attention = s is not None and s % 2 == 0
    num_reads = roles.num_reads if is_attention else 1
    step = schedule.final if s is None else schedule.step(s)
    # In the order: null source, slots of the memory, running source.
    mask = [True] * null + list(np.arange(schedule.num_slots) < step.visible)
    if VARIANTS[variant].running_source != "none":
      mask.append(bool(step.reads_running))
    assert sum(mask) == len(schedule.sources(s)) + null
    assert weights_RxHxNxBxT.shape == (num_reads, heads, len(mask), 2, 9)
    by_source = np.moveaxis(weights_RxHxNxBxT, 2, 0)
    mask = np.array(mask, bool)
    assert (by_source[mask] >= 0).all()
    assert (by_source[mask].max(axis=(1, 2, 3, 4)) > 0).all()
    assert (by_source[~mask] == 0).all()
    np.testing.assert_allclose(by_source.sum(0), float(mask.any()), atol=1e-12)
    for read, alpha_HxNxBxT in enumerate(expected[-1 if s is None else s]):
      np.testing.assert_allclose(
        weights_RxHxNxBxT[read][:, mask], alpha_HxNxBxT, atol=1e-10
      )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", ["delta_block", "rd_attnres"])
def test_capturing_does_not_change_a_bit(variant, dtype):
  config = tiny_config(variant, dtype=dtype, param_dtype="float32")
  model = TransformerLM(config)
  params, tokens = random_params(config), random_tokens(config)
  plain, capturing = (  # compiled as users do: bits depend on it
    jax.jit(
      lambda params, mutable=mutable: model.apply(
        {"params": params}, tokens, mutable=mutable
      )
    )(params)
    for mutable in (False, "routing")
  )
  assert jax.tree.leaves(capturing[1])
  np.testing.assert_array_equal(capturing[0].logits_BxTxV, plain.logits_BxTxV)


def test_nothing_is_captured_unless_asked_for():
  config = tiny_config(**FLOAT32)
  assert initial_variables(config).keys() == {"params"}


# --- Errors ----------------------------------------------------------------


@pytest.mark.parametrize(
  "tokens, more, message",
  [
    ([[0, 41]], {}, "from 0 to 41; the vocabulary has ids 0 to 40"),
    ([[-1, 3]], {}, "from -1 to 3"),
    ([0, 1], {}, r"\(2,\)"),
    ([[0, 1]], {"segment_ids": [[0]]}, r"segment_ids .*\(1, 1\).*\(1, 2\)"),
    ([[0, 1]], {"positions": [0, 1]}, r"positions .*\(2,\).*\(1, 2\)"),
  ],
)
def test_inputs_that_do_not_fit_raise(tokens, more, message):
  config = tiny_config(**FLOAT32)
  more = {name: np.array(x) for name, x in more.items()}
  with pytest.raises(ConfigError, match=message):
    TransformerLM(config).apply(
      {"params": random_params(config)}, np.array(tokens), **more
    )


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_layer": 3}, "did you mean 'num_layers'"),
    ({"variant": "delta_blok"}, "did you mean 'delta_block'"),
    ({"variant": "rd_atnres"}, "did you mean 'rd_attnres'"),
    ({"gate": "sigmod"}, "did you mean 'sigmoid'"),
    ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
    ({"remat": "ful"}, "did you mean 'full'"),
    ({"variant": "attnres_block", "gate": "scalar"}, "additive variant"),
    ({"variant": "delta_replace", "gate": "sigmoid"}, "'delta_replace'"),
    ({"variant": "standard", "gate": "scalar"}, "'standard'"),
    ({"heads": 3}, "width 16 .*heads 3"),
    ({"key_dim": 17}, "17, more than the width 16"),
    ({"key_dim": 6, "heads": 4}, "key_dim 6 .*heads 4"),
    ({"variant": "standard", "heads": 2}, "heads=2 .*'standard'"),
    ({"variant": "embedding_skip", "null_source": True}, "null_source=True"),
    ({"variant": "embedding_skip", "key_dim": 4}, "key_dim=4"),
    ({"variant": "standard", "query_init_std": 0.1}, "query_init_std=0.1"),
    ({"heads": 0}, "heads is 0"),
    ({"num_blocks": 0}, "num_blocks is 0"),
    ({"num_blocks": 7}, "7, more than the 6 layers"),
    ({"query_init_std": -1.0}, "-1.0"),
    ({"num_heads": 3}, "num_heads 3 .*num_kv_heads 2"),
    ({"head_dim": 7}, "7; rotary"),
    ({"width": 0}, "width is 0"),
    ({"norm_eps": -1e-6}, "norm_eps"),
  ],
  ids=str,
)
def test_configs_that_make_no_sense_raise(options, message):
  with pytest.raises(ConfigError, match=message):
    tiny_config(**options)


def test_unknown_routing_field_names_the_nearest():
  with pytest.raises(ConfigError, match="did you mean 'null_source'"):
    RoutingConfig(nul_source=True)


def test_an_unknown_implementation_raises():
  with pytest.raises(ConfigError, match="did you mean 'xla'"):
    tiny_config(depth_attention="xl")
