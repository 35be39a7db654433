"""What is about to run, on one screen."""

from typing import Any

import jax
import jax.numpy as jnp

from deltajax.checkpoints.names import count_parameters
from deltajax.config import ModelConfig, RunConfig
from deltajax.data.pipeline import Mixture
from deltajax.models.attention import AttentionCase, choose_attention
from deltajax.routing.choice import Choice
from deltajax.routing.depth_attention import choose_reader
from deltajax.routing.readers import case_of
from deltajax.routing.schedule import build_schedule
from deltajax.routing.sharding import Sharding, use_sharding
from deltajax.training.mesh import AXES

_LEARN = {"none": "", "base": ", which alone learn"}


def attention_choice(config: RunConfig, sharding: Sharding) -> Choice:
  """What serves the attention of a run.

  Raises:
    ConfigError: if the config names something that cannot.
  """
  model = config.model
  with use_sharding(sharding):
    case = AttentionCase.traced(
      config.data.sequence_length, model.head_dim, model.dtype, "int32"
    )
  return choose_attention(case, model.attention, platform=sharding.platform)


def depth_choice(config: RunConfig, sharding: Sharding) -> Choice:
  """What passes over the depth memory in the layers of a run.

  Raises:
    ConfigError: if the config names something that cannot.
  """
  model, training = config.model, config.training
  row = model.routing.row
  num_slots = build_schedule(model.routing, model.num_layers).num_slots
  if not num_slots:
    return Choice("nothing is read", {})
  reads = row.roles.num_reads + row.single_role.num_reads
  reads *= _layers_together(model)
  micro_batch = training.batch_size // training.accumulation
  with use_sharding(sharding):
    case = case_of(
      jax.ShapeDtypeStruct(
        (reads, model.routing.key_size(model.width)), jnp.float32
      ),
      jax.ShapeDtypeStruct(
        (num_slots, micro_batch, config.data.sequence_length, model.width),
        jnp.dtype(model.dtype),
      ),
      model.routing.heads,
      model.norm_eps,
    )
  return choose_reader(case, model.depth_attention, platform=sharding.platform)


def host_line() -> str:
  """Which host this is: the one line that every host prints."""
  return f"host      {jax.process_index()} of {jax.process_count()}"


def summary(
  config: RunConfig, sharding: Sharding, train: Mixture, params: Any
) -> list[str]:
  """Lines that say what is about to run.

  Args:
    config: of the run.
    sharding: of the run.
    train: the rows that it learns from.
    params: parameters, or their ShapeDtypeStructs.
  """
  model, routing, training = config.model, config.model.routing, config.training
  devices = sharding.mesh.devices
  device = devices.flat[0]
  axes = ", ".join(
    f"{axis} {size}" for axis, size in zip(AXES, devices.shape, strict=True)
  )
  attention = attention_choice(config, sharding)
  depth = depth_choice(config, sharding)
  return [
    f"devices   {devices.size} x {device.device_kind} ({device.platform});"
    f" mesh {axes}",
    f"routing   {routing.variant}: {routing.row.summary}",
    f"model     {model.num_layers} layers, width {model.width},"
    f" {count_parameters(params)}{_LEARN[config.freeze]}",
    f"compute   {model.dtype}, remat {model.remat}, {model.scan} depth scan",
    f"attention {attention}",
    f"depth     {depth}{_together(model)}",
    *(
      f"data      {name}: {source.info.num_tokens:,} tokens in"
      f" {source.info.num_documents:,} documents{_share(weight)}"
      for name, source, weight in zip(
        config.data.datasets, train.sources, train.weights, strict=True
      )
    ),
    f"training  {training.steps} updates of {training.batch_size} x"
    f" {config.data.sequence_length} tokens, seed {training.seed}",
  ]


def _layers_together(model: ModelConfig) -> int:
  """How many layers read in one pass."""
  return 1 if model.scan == "plain" else model.read_group


def _together(model: ModelConfig) -> str:
  layers = _layers_together(model)
  return "" if layers == 1 else f"; {layers} layers read in one pass"


def _share(weight: float) -> str:
  return "" if weight == 1 else f", {weight:.1%} of the rows"
