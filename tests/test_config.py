import dataclasses
import json

from flax import traverse_util
import numpy as np
import pytest

from deltajax.checkpoints.names import parameter_shapes
from deltajax.config import (
  ConfigError,
  DataConfig,
  differences,
  from_dict,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RopeScaling,
  RoutingConfig,
  RunConfig,
  to_dict,
  TrainingConfig,
)
from deltajax.models.transformer import is_routing
from deltajax.routing.variants import VARIANTS
from tests.helpers import tiny_config

MODEL = {
  "vocab_size": 31,
  "width": 16,
  "num_layers": 4,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 4,
  "mlp_width": 16,
}


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: RoutingConfig(variant="delta_blok"), "did you mean 'delta_block'"),
    (lambda: RoutingConfig(varient="delta"), "did you mean 'variant'"),
    (lambda: RoutingConfig(gate="sigmod"), "did you mean 'sigmoid'"),
    (lambda: RoutingConfig(num_blocks=0), "num_blocks is 0"),
    (lambda: RoutingConfig(query_init_std=-1), "is -1"),
    (
      lambda: RoutingConfig(variant="standard", heads=2),
      "heads=2 has no meaning for variant 'standard'",
    ),
    (
      lambda: RoutingConfig(variant="embedding_skip", null_source=True),
      "null_source=True has no meaning",
    ),
    (
      lambda: RoutingConfig(variant="attnres_block", gate="scalar"),
      "needs an additive variant",
    ),
    (
      lambda: RoutingConfig(variant="standard", gate="scalar"),
      "needs an additive variant",
    ),
    (lambda: ModelConfig(**MODEL, widht=3), "did you mean 'width'"),
    (lambda: ModelConfig(**MODEL | {"num_kv_heads": 3}), "4.*not divisible"),
    (lambda: ModelConfig(**MODEL | {"head_dim": 5}), "even number"),
    (lambda: ModelConfig(**MODEL | {"width": 0}), "model.width is 0"),
    (lambda: ModelConfig(**MODEL, dtype="bf16"), "did you mean 'bfloat16'"),
    (
      lambda: ModelConfig(**MODEL, routing=RoutingConfig(num_blocks=5)),
      "num_blocks is 5, more than the 4 layers",
    ),
    (
      lambda: ModelConfig(**MODEL, routing=RoutingConfig(heads=3)),
      "width 16 is not divisible by routing.heads 3",
    ),
    (
      lambda: ModelConfig(**MODEL, routing=RoutingConfig(key_dim=17)),
      "key_dim is 17, more than the width 16",
    ),
    (
      lambda: ModelConfig(**MODEL, routing=RoutingConfig(key_dim=6, heads=4)),
      "key_dim 6 is not divisible by routing.heads 4",
    ),
    (lambda: RopeScaling(kind="lama3"), "did you mean 'llama3'"),
    (lambda: RopeScaling(factor=2.0), "factor is 2.0, but .* scales nothing"),
    (
      lambda: RopeScaling(kind="llama3", low_freq_factor=4.0),
      "high_freq_factor is 4.0; it must be above low_freq_factor 4.0",
    ),
    (lambda: RopeScaling(kind="llama3", factor=0.0), "factor is 0.0"),
    (lambda: DataConfig(sequence_length=0), "sequence_length is 0"),
    (lambda: OptimizerConfig(b2=1.0), "b2 is 1.0"),
    (lambda: OptimizerConfig(learning_rate=-1), "learning_rate is -1"),
    (
      lambda: TrainingConfig(batch_size=10, accumulation=4),
      "10 is not divisible by training.accumulation 4",
    ),
    (
      lambda: RunConfig(
        model=ModelConfig(**MODEL), training=TrainingConfig(steps=10)
      ),
      "warmup_steps 1000 leaves nothing of training.steps 10",
    ),
  ],
)
def test_bad_options_are_named_with_a_remedy(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: RoutingConfig(num_blocks=2.5), "num_blocks is 2.5; .* int"),
    (lambda: RoutingConfig(heads=True), "heads is True; it must be int"),
    (lambda: RoutingConfig(null_source=1), "null_source is 1; it must be bool"),
    (lambda: RoutingConfig(key_dim="8"), r"key_dim is '8'; .* int \| None"),
    (
      lambda: OptimizerConfig(learning_rate=float("nan")),
      "learning_rate is nan; it must be a finite float",
    ),
    (lambda: OptimizerConfig(eps="1e-8"), "eps is '1e-8'"),
    (lambda: ModelConfig(**MODEL, routing="delta"), "routing is 'delta'"),
    (
      lambda: RunConfig(model=ModelConfig(**MODEL, param_dtype="bfloat16")),
      "param_dtype is bfloat16; small updates would be rounded away",
    ),
    (
      lambda: RunConfig(model=ModelConfig(**MODEL, dtype="float16")),
      "float16; its gradients underflow",
    ),
    (
      lambda: RunConfig(model=ModelConfig(**MODEL, norm_eps=0.0)),
      "norm_eps is 0",
    ),
    (
      lambda: RunConfig(
        model=ModelConfig(**MODEL),
        training=TrainingConfig(stop_after=20_000),
      ),
      "stop_after 20000 is beyond training.steps 10000",
    ),
  ],
)
def test_values_of_the_wrong_kind_are_named(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def test_whole_numbers_are_fine_where_fractions_are():
  assert OptimizerConfig(weight_decay=0).weight_decay == 0
  assert RoutingConfig(num_blocks=np.int64(2)).num_blocks == 2


def test_blocks_do_not_matter_to_variants_without_them():
  routing = RoutingConfig(variant="delta", num_blocks=100)
  ModelConfig(**MODEL, routing=routing)


def test_dictionaries_round_trip_through_json():
  config = RunConfig(
    model=ModelConfig(
      **MODEL, routing=RoutingConfig(variant="rd_delta", gate="sigmoid")
    ),
    training=TrainingConfig(stop_after=3),
  )
  assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_unknown_keys_of_a_dictionary_are_named():
  values = to_dict(RunConfig(model=ModelConfig(**MODEL)))
  values["model"]["routing"]["num_block"] = 3
  with pytest.raises(ConfigError, match="did you mean 'num_blocks'"):
    from_dict(RunConfig, values)


WRONG = (None, True, 3, -0.5, "x", [], [1], {}, {"x": 1})


def damaged(values):
  """Copies of nested dictionaries with one value lost, or of another kind."""
  yield from ({**values, key: wrong} for key in values for wrong in WRONG)
  for key, value in values.items():
    yield {k: x for k, x in values.items() if k != key}
    if isinstance(value, dict):
      yield from ({**values, key: inner} for inner in damaged(value))


def test_damaged_dictionaries_are_refused_or_are_configs():
  values = to_dict(RunConfig(model=ModelConfig(**MODEL)))
  whole, refused = 0, 0
  for copy in (*WRONG, *damaged(json.loads(json.dumps(values)))):
    try:
      found = from_dict(RunConfig, copy)
    except ConfigError:
      refused += 1
    else:
      assert isinstance(found, RunConfig)
      whole += 1
  assert whole > 50
  assert refused > 400


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ([], r"RunConfig is \[\]; it must be a mapping of its fields"),
    ({}, "RunConfig lacks model"),
    ({"model": 3}, "ModelConfig is 3; it must be a mapping"),
    (
      {"model": {"width": 16, "num_heads": 4}},
      "ModelConfig lacks vocab_size, num_layers, num_kv_heads, head_dim, mlp_w",
    ),
    ({"model": MODEL | {"routing": 3}}, "RoutingConfig is 3"),
  ],
)
def test_what_is_missing_or_of_another_kind_is_named(values, message):
  with pytest.raises(ConfigError, match=message):
    from_dict(RunConfig, values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_freezing_the_base_needs_routing_that_learns(variant):
  model = tiny_config(variant, dtype="float32", param_dtype="float32")
  learns = any(
    is_routing(path)
    for path in traverse_util.flatten_dict(parameter_shapes(model))
  )
  if learns:
    RunConfig(model=model, freeze="base")
    return
  message = f"variant '{variant}' has no parameters that route"
  with pytest.raises(ConfigError, match=message):
    RunConfig(model=model, freeze="base")


def test_what_a_resumed_run_may_differ_in_must_exist():
  def run(*names):
    training = TrainingConfig(accept=names)
    return RunConfig(model=ModelConfig(**MODEL), training=training)

  one, other = run(), dataclasses.replace(run(), mesh=MeshConfig(fsdp=2))
  assert list(differences(one, other)) == ["mesh.fsdp"]
  run("mesh", "mesh.fsdp", "data.content", "optimizer.eps", "training.seed")
  for name, nearest in {
    "training.sed": "training.seed",
    "optimiser": "optimizer",
    "data.contents": "data.content",
    "mesh.fsdp.x": "mesh.fsdp",
  }.items():
    with pytest.raises(ConfigError, match=f"'{name}'; did you mean '{nearest}"):
      run("data", name)
  for name in ("model", "model.width", "freeze", "init_from"):
    with pytest.raises(ConfigError, match=f"accept '{name}': .* --init-from"):
      run(name)


def test_differences_are_dotted_names():
  one = RunConfig(model=ModelConfig(**MODEL))
  other = dataclasses.replace(
    one,
    model=dataclasses.replace(
      one.model, routing=RoutingConfig(variant="delta")
    ),
    training=TrainingConfig(seed=7),
  )
  assert differences(one, other) == {
    "model.routing.variant": ("delta_block", "delta"),
    "training.seed": (0, 7),
  }
  assert differences(one, one) == {}


def test_configs_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    RoutingConfig().heads = 2
