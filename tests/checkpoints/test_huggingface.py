"""Model directories of transformers: reading, writing and reading again.

The models and their logits come from transformers
(tests/testdata/huggingface/README.md).
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from deltajax.checkpoints import huggingface, tensor_files
from deltajax.checkpoints.huggingface import (
  load_config,
  load_pretrained,
  save_pretrained,
)
from deltajax.checkpoints.names import tensor_places
from deltajax.config import ConfigError, RoutingConfig
from deltajax.routing import VARIANTS
from tests.helpers import (
  assert_trees_equal,
  EIGHT_DEVICES,
  logits_of,
  random_params,
  run_module,
  tiny_config,
)

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "testdata" / "huggingface"
MODELS = sorted(path.stem for path in DATA.glob("*.safetensors"))
SINGLE_FLOAT = {"dtype": "float32", "param_dtype": "float32"}


def stored_tensors(directory):
  tensors = {}
  for file in sorted(directory.glob("*.safetensors")):
    tensors |= safetensors.numpy.load_file(file)
  return tensors


def files_of(directory):
  return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] * (name == "llama-untied"))
    for name in MODELS
  ],
)
def test_logits_are_those_of_transformers_at_every_position(name):
  config, params = load_pretrained(DATA / name)
  reference = safetensors.numpy.load_file(DATA / f"{name}.safetensors")
  config = dataclasses.replace(config, dtype="float32")
  logits = logits_of(config, params, reference["input_ids"])
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_same_tensors_and_the_same_config(name, tmp_path):
  config, params = load_pretrained(DATA / name, param_dtype=None)
  save_pretrained(tmp_path / "out", config, params, like=DATA / name)
  again = load_pretrained(tmp_path / "out", param_dtype=None)
  assert again.config == config
  assert_trees_equal(again.params, params)
  written, stored = (stored_tensors(x) for x in (tmp_path / "out", DATA / name))
  assert written.keys() == stored.keys()
  for key, tensor in written.items():
    assert tensor.dtype == stored[key].dtype
    np.testing.assert_array_equal(tensor, stored[key], err_msg=key)
  ours, theirs = (
    json.loads((x / "config.json").read_text())
    for x in (tmp_path / "out", DATA / name)
  )
  for key in theirs.keys() & ours.keys():
    assert ours[key] == theirs[key] or key == "rope_scaling", key


def test_dtypes():
  name = DATA / "llama-transformers4"  # Stored in bfloat16.
  stored = stored_tensors(name)["lm_head.weight"]
  for param_dtype, expected in (
    (None, jnp.bfloat16),
    ("bfloat16", jnp.bfloat16),
    ("float32", jnp.float32),
  ):
    config, params = load_pretrained(name, param_dtype=param_dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(expected)}
    assert config.param_dtype == jnp.dtype(expected).name
    np.testing.assert_array_equal(params["head"].T, stored)
  rounded = load_pretrained(DATA / "qwen3-tied", param_dtype="bfloat16").params
  exact = load_pretrained(DATA / "qwen3-tied").params
  assert_trees_equal(
    rounded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
  )
  with pytest.raises(ConfigError, match="unknown param_dtype 'float16'"):
    load_pretrained(name, param_dtype="float16")


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_own_layout_holds_every_variant(variant, tmp_path):
  options = {}
  if VARIANTS[variant].learned:
    options = {"heads": 2, "key_dim": 8, "null_source": True}
  config = tiny_config(variant, **SINGLE_FLOAT, **options)
  params = random_params(config)
  save_pretrained(tmp_path / "out", config, params, layout="deltajax")
  again = load_pretrained(tmp_path / "out")
  assert again.config == config
  assert_trees_equal(again.params, params)


def test_shards(tmp_path):
  config, params = load_pretrained(DATA / "llama-untied")
  save_pretrained(tmp_path, config, params, shard_bytes=10_000)
  index = json.loads((tmp_path / tensor_files.INDEX).read_text())
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert len(files) > 2
  assert sorted(set(index["weight_map"].values())) == files
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  assert index["metadata"]["total_size"] == total
  for file in files:
    tensors = safetensors.numpy.load_file(tmp_path / file)
    assert {index["weight_map"][name] for name in tensors} == {file}
    assert sum(x.nbytes for x in tensors.values()) <= 10_000
  assert_trees_equal(load_pretrained(tmp_path).params, params)


def test_parameters_on_a_mesh():
  done = run_module("tests.checkpoints.sharded_program", env=EIGHT_DEVICES)
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("equal") == 4


def test_shardings_that_are_no_tree_of_the_parameters():
  config, params = load_pretrained(DATA / "llama-tied")
  shardings = jax.tree.map(lambda x: x.sharding, params)
  found = load_pretrained(DATA / "llama-tied", shardings=shardings)
  assert_trees_equal(found.params, params)
  assert found.config == config
  del shardings["embedding"]
  with pytest.raises(ConfigError, match=r"'embedding'.* are in one alone"):
    load_pretrained(DATA / "llama-tied", shardings=shardings)


def test_no_second_copy_is_in_memory(tmp_path):
  """Beyond the parameters there is about one tensor, whatever their number."""
  config = tiny_config(
    "standard", width=64, mlp_width=512, num_layers=8, **SINGLE_FLOAT
  )
  save_pretrained(tmp_path, config, random_params(config))
  load_pretrained(tmp_path)  # Traces and compiles what is kept.
  tracemalloc.start()
  params = load_pretrained(tmp_path).params
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  largest = max(sizes) / config.num_layers
  assert sum(sizes) < peak < 1.3 * sum(sizes) + largest


def test_tokenizer_token_ids_and_context_are_carried_along(tmp_path):
  source = shutil.copytree(DATA / "qwen3-tied", tmp_path / "in")
  write_tokenizer(source, 37)
  model = load_pretrained(source)
  save_pretrained(tmp_path / "own", *model, like=source, layout="deltajax")
  save_pretrained(tmp_path / "out", *model, like=tmp_path / "own")
  for name in ("tokenizer.json", "generation_config.json"):
    expected = (source / name).read_bytes()
    assert (tmp_path / "out" / name).read_bytes() == expected
  values, theirs = (
    json.loads((x / "config.json").read_text())
    for x in (tmp_path / "out", source)
  )
  for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
    assert values[key] == theirs[key]


# --- Directories that cannot be read ---------------------------------------


def edit_config(**changes):
  def edit(directory):
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    values = {key: x for key, x in values.items() if x is not ...}
    path.write_text(json.dumps(values))

  return edit


def edit_tensors(edit):
  def apply(directory):
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)

  return apply


def edit_index(edit):
  def apply(directory):
    path = directory / tensor_files.INDEX
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))

  return apply


def write_tokenizer(directory, size):
  vocab = {f"token{i}": i for i in range(size - 1)}
  tokenizer = {
    "model": {"type": "BPE", "vocab": vocab},
    "added_tokens": [{"id": size - 1, "content": "<end>"}],
  }
  (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def truncate(directory):
  path = directory / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-1])


def pickle_only(directory):
  (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def twice(directory):
  first, second = sorted(directory.glob("*.safetensors"))[:2]
  tensors = safetensors.numpy.load_file(second)
  name, tensor = next(iter(safetensors.numpy.load_file(first).items()))
  safetensors.numpy.save_file(tensors | {name: tensor}, second)


def shard(directory, number=2):
  return sorted(directory.glob("*.safetensors"))[number]


LAYER = "model.layers.1."
FAULTS = {
  "a missing shard": (
    "qwen3-untied",
    lambda directory: shard(directory).unlink(),
    "lacks 1 of the 5 files .*: model-00003-of-00005.safetensors",
  ),
  "a truncated file": ("qwen3-tied", truncate, "no complete safetensors file"),
  "an index that names an absent tensor": (
    "qwen3-untied",
    edit_index(
      lambda index: index["weight_map"].update(
        {"model.new": shard(DATA / "qwen3-untied").name}
      )
    ),
    r"missing: model\.new, which .* places in model-00003-of",
  ),
  "an index that leads elsewhere": (
    "qwen3-untied",
    edit_index(
      lambda index: index["weight_map"].update({"x": "../other.safetensors"})
    ),
    "no file beside it",
  ),
  "an index that is none": (
    "qwen3-untied",
    edit_index(lambda index: index.pop("weight_map")),
    "no index of shards",
  ),
  "a tensor twice": ("qwen3-untied", twice, "duplicate: .*, again in model-"),
  "another head_dim": (
    "qwen3-tied",
    edit_config(head_dim=16),
    r"head_dim 16.*self_attn\.k_proj\.weight has shape \[16, 16\], expected"
    r" \[32, 16\]",
  ),
  "an absent head_dim of Qwen3 is 128": (
    "qwen3-tied",
    edit_config(head_dim=...),
    r"head_dim 128.*expected \[256, 16\]",
  ),
  "an unknown model_type": (
    "qwen3-tied",
    edit_config(model_type="qwen2"),
    "unknown model_type .* did you mean 'qwen3'",
  ),
  "a config without model_type": (
    "qwen3-tied",
    edit_config(model_type=...),
    "no model_type",
  ),
  "a config without sizes": (
    "qwen3-tied",
    edit_config(hidden_size=..., vocab_size=...),
    r"config\.json lacks hidden_size, vocab_size",
  ),
  "a config with other sizes": (
    "llama-tied",
    edit_config(num_attention_heads=0),
    "num_attention_heads 0; it must be at least 1",
  ),
  "a config with words": (
    "llama-tied",
    edit_config(hidden_size="16", head_dim=None),
    "hidden_size '16'; it must be",
  ),
  "a config with kinds of layers that are none": (
    "qwen3-tied",
    edit_config(layer_types=3),
    "layer_types 3; only full_attention",
  ),
  "a config with another kind of context": (
    "llama-tied",
    edit_config(max_position_embeddings="long"),
    "max_position_embeddings 'long'; it must be at least 1",
  ),
  "an own config that lacks sizes": (
    "llama-tied",
    edit_config(model_type="deltajax", model={"width": 16}),
    r"config\.json: ModelConfig lacks vocab_size, num_layers",
  ),
  "an own config of another kind": (
    "llama-tied",
    edit_config(model_type="deltajax", model={"routing": 3}),
    r"config\.json: RoutingConfig is 3; it must be a mapping",
  ),
  "a tokenizer of another model": (
    "qwen3-tied",
    lambda directory: write_tokenizer(directory, 38),
    "has ids up to 37, but the model's vocabulary has 37",
  ),
  "a tokenizer that is none": (
    "qwen3-tied",
    lambda directory: (directory / "tokenizer.json").write_text("{}"),
    "is no tokenizer",
  ),
  "a pickle": (
    "qwen3-tied",
    pickle_only,
    r"pytorch_model\.bin, a pickle, which can run any code",
  ),
  "no weights": (
    "qwen3-tied",
    lambda directory: (directory / "model.safetensors").unlink(),
    "has neither model.safetensors nor",
  ),
  "a sliding window": (
    "qwen3-tied",
    edit_config(use_sliding_window=True),
    "has use_sliding_window True; only False is supported",
  ),
  "layers with a sliding window": (
    "qwen3-tied",
    edit_config(layer_types=["full_attention", "sliding_attention"] * 2),
    "layer_types sliding_attention; only full_attention",
  ),
  "another activation": (
    "llama-tied",
    edit_config(hidden_act="gelu"),
    "has hidden_act 'gelu'; only 'silu'",
  ),
  "quantisation": (
    "llama-tied",
    edit_config(quantization_config={"bits": 4}),
    "has quantization_config",
  ),
  "another rope": (
    "llama-tied",
    edit_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
    "unknown rope type in config.json 'yarn'",
  ),
  "a rope of transformers 4": (
    "llama-transformers4",
    edit_config(rope_scaling={"type": "linear", "factor": 2.0}),
    "unknown rope type in config.json 'linear'",
  ),
  "a rope that is none": (
    "llama-tied",
    edit_config(rope_parameters="llama3"),
    "the rope of config.json is 'llama3'",
  ),
  "half a rope": (
    "llama-tied",
    edit_config(rope_parameters={"rope_type": "llama3", "factor": 2.0}),
    "the llama3 rope of config.json lacks high_freq_factor, low_freq_factor",
  ),
  "a rope with more to it": (
    "llama-tied",
    edit_config(rope_parameters={"mrope_section": [2, 2]}),
    "the default rope of config.json has, .* mrope_section",
  ),
  "rotation of a part of a head": (
    "llama-tied",
    edit_config(rope_parameters={"partial_rotary_factor": 0.5}),
    "rotates a part of each head",
  ),
  "an untied model without a head": (
    "llama-untied",
    edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
    r"missing: lm_head\.weight$",
  ),
  "a tied model with another head": (
    "llama-tied",
    edit_tensors(
      lambda tensors: tensors.update(
        {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
      )
    ),
    r"lm_head\.weight is not model\.embed_tokens\.weight",
  ),
  "integers": (
    "llama-tied",
    edit_tensors(
      lambda tensors: tensors.update(
        {"model.norm.weight": np.ones(16, np.int8)}
      )
    ),
    r"model\.norm\.weight is stored as I8",
  ),
  "a released mode that is not here": (
    "qwen3-tied",
    edit_config(
      model_type="qwen3_attnres", attnres_mode="delta_v", attnres_num_blocks=2
    ),
    "unknown attnres_mode in config.json 'delta_v'",
  ),
  "a released null source that is not read": (
    "qwen3-tied",
    edit_config(
      model_type="qwen3_attnres",
      attnres_mode="block",
      attnres_num_blocks=2,
      attnres_use_null_source=True,
    ),
    "has null sources but reads none",
  ),
  "a released gate on a replacement variant": (
    "qwen3-tied",
    edit_config(
      model_type="qwen3_attnres",
      attnres_mode="full",
      attnres_num_blocks=2,
      attnres_gate_type="learnable_alpha",
    ),
    "needs an additive variant",
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_directory_that_cannot_be_read_is_one_message(fault, tmp_path):
  name, damage, message = FAULTS[fault]
  directory = shutil.copytree(DATA / name, tmp_path / name)
  damage(directory)
  with pytest.raises(ConfigError, match=f"(?s){message}"):
    load_pretrained(directory)


def test_all_that_is_wrong_with_the_tensors_is_one_message(tmp_path):
  directory = shutil.copytree(DATA / "llama-untied", tmp_path / "model")

  def edit(tensors):
    del tensors[LAYER + "mlp.up_proj.bias"]
    del tensors["model.norm.weight"]
    tensors[LAYER + "mlp.up_proj.weight"] = np.zeros((16, 24), np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros(1, np.float32)
    tensors["visual.weight"] = np.zeros(1, np.float32)
    # What old versions stored is no parameter.
    tensors[LAYER + "self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

  edit_tensors(edit)(directory)
  with pytest.raises(ConfigError) as raised:
    load_pretrained(directory)
  assert str(raised.value).splitlines()[1:] == [
    f"  missing: {LAYER}mlp.up_proj.bias",
    "  missing: model.norm.weight",
    f"  {LAYER}mlp.up_proj.weight has shape [16, 24], expected [24, 16]",
    "  unexpected: model.layers.3.mlp.up_proj.weight",
    "  unexpected: visual.weight",
  ]


def test_a_tied_model_may_have_its_head_twice(tmp_path):
  directory = shutil.copytree(DATA / "llama-tied", tmp_path / "model")
  edit_tensors(
    lambda tensors: tensors.update(
      {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
  )(directory)
  expected = load_pretrained(DATA / "llama-tied").params
  assert_trees_equal(load_pretrained(directory).params, expected)


def test_what_a_config_may_leave_out(tmp_path):
  directory = shutil.copytree(DATA / "llama-tied", tmp_path / "model")
  expected = load_config(directory)
  keys = ("head_dim", "mlp_bias", "attention_bias", "rope_parameters")
  edit_config(
    **dict.fromkeys((*keys, "initializer_range"), ...),
    # Keys of SmolLM2 that say nothing new, and the spelling of transformers 4.
    rope_interleaved=False,
    is_llama_config=True,
    rope_theta=10000,
    rope_scaling=None,
  )(directory)
  assert load_config(directory) == expected
  edit_config(num_key_value_heads=None)(directory)
  assert load_config(directory).num_kv_heads == expected.num_heads


def test_more_released_blocks_than_layers_are_as_many_as_layers(tmp_path):
  directory = shutil.copytree(DATA / "qwen3-tied", tmp_path / "model")
  released = {"model_type": "qwen3_attnres", "attnres_mode": "block"}
  edit_config(**released, attnres_num_blocks=8)(directory)
  assert load_config(directory).routing.num_blocks == 3


def test_a_routed_model_is_not_routed_again(tmp_path):
  routing = RoutingConfig(variant="delta_block", num_blocks=3)
  model = load_pretrained(DATA / "qwen3-tied", routing)
  save_pretrained(tmp_path, *model, layout="deltajax")
  assert_trees_equal(load_pretrained(tmp_path, routing).params, model.params)
  with pytest.raises(ConfigError, match=r"is routed already \(delta_block\)"):
    load_pretrained(tmp_path, RoutingConfig(variant="delta"))


def test_without_safetensors_the_message_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "safetensors", None)
  with pytest.raises(ConfigError, match=r"pip install '.\[pretrained\]'"):
    load_pretrained(DATA / "qwen3-tied")


# --- Models and directories that cannot be written -------------------------


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"variant": "delta_block"}, "has no variant 'delta_block'"),
    ({"variant": "embedding_skip_scaled"}, "has no variant"),
    ({"variant": "delta", "heads": 2}, r"no routing\.heads, here 2"),
    ({"variant": "delta", "key_dim": 8}, r"no routing\.key_dim, here 8"),
    ({"variant": "delta", "qk_norm": False}, "is for Qwen3"),
    (
      {"variant": "attnres_block", "null_source": True},
      "reads null sources in additive variants alone",
    ),
    ({"variant": "standard", "mlp_bias": True}, "Qwen3 has no mlp_bias"),
    (
      {"variant": "standard", "qk_norm": False, "num_heads": 6},
      "divisible by the heads, not 16 and 6",
    ),
  ],
)
def test_what_other_programs_cannot_hold_is_refused(options, message, tmp_path):
  config = tiny_config(**SINGLE_FLOAT, **options)
  with pytest.raises(ConfigError, match=message):
    save_pretrained(tmp_path / "out", config, random_params(config))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_export_leaves_everything_as_it_was(
  error, exists, tmp_path, monkeypatch
):
  target = tmp_path / "out"
  if exists:
    shutil.copytree(DATA / "qwen3-untied", target)
  before = files_of(target) if exists else None
  write = tensor_files.write_tensors

  def fail(*args):
    write(*args)
    raise error

  monkeypatch.setattr(huggingface, "write_tensors", fail)
  with pytest.raises(type(error)):
    save_pretrained(target, *load_pretrained(DATA / "llama-tied"))
  assert list(tmp_path.iterdir()) == [target] * exists
  if exists:
    assert files_of(target) == before


def test_a_directory_that_cannot_be_put_in_place_changes_nothing(
  tmp_path, monkeypatch
):
  target = shutil.copytree(DATA / "qwen3-untied", tmp_path / "out")
  before = files_of(target)
  rename = pathlib.Path.rename

  def fail(path, to):
    if path.name == "new":
      raise OSError("not now")
    return rename(path, to)

  monkeypatch.setattr(pathlib.Path, "rename", fail)
  with pytest.raises(OSError, match="not now"):
    save_pretrained(target, *load_pretrained(DATA / "llama-tied"))
  assert files_of(target) == before
  assert list(tmp_path.iterdir()) == [target]


def test_an_export_replaces_all_of_another_model(tmp_path):
  target = shutil.copytree(DATA / "qwen3-untied", tmp_path / "out")
  model = load_pretrained(DATA / "llama-tied")
  save_pretrained(target, *model)
  assert files_of(target).keys() == {"config.json", "model.safetensors"}
  assert_trees_equal(load_pretrained(target).params, model.params)
  # Readable to whoever may read the directory.
  modes = {path.stat().st_mode for path in target.iterdir()}
  assert len(modes) == 1


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints", ".git"])
def test_an_export_removes_nothing_that_is_no_model(name, tmp_path):
  (tmp_path / name).mkdir()
  with pytest.raises(ConfigError, match=f"holds '{name}'"):
    save_pretrained(tmp_path, *load_pretrained(DATA / "llama-tied"))
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_is_not_replaced(tmp_path):
  (tmp_path / "config.json").write_text('{"model": {}, "training": {}}')
  with pytest.raises(ConfigError, match=r"holds 'config\.json'"):
    save_pretrained(tmp_path, *load_pretrained(DATA / "llama-tied"))


def test_parameters_that_do_not_fit_are_all_named(tmp_path):
  config, params = load_pretrained(DATA / "llama-tied")
  del params["embedding"]
  params["other"] = jnp.zeros(3)
  params["final_norm"] = {"scale": jnp.zeros(3)}
  with pytest.raises(ConfigError) as raised:
    save_pretrained(tmp_path / "out", config, params)
  assert str(raised.value).splitlines()[1:] == [
    "  missing: embedding",
    "  unexpected: other",
    "  final_norm/scale has shape (3,), expected (16,)",
  ]
  assert not list(tmp_path.iterdir())


def test_every_tensor_has_a_place_of_its_own():
  for variant in VARIANTS:
    config = tiny_config(variant, tie_embeddings=False, **SINGLE_FLOAT)
    places = tensor_places(config)
    slots = {(place.path, place.layer) for place in places.values()}
    assert len(slots) == len(places)
