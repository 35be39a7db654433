"""Run in a process with 8 CPU devices: every mesh does what one device does."""

import math
import re
import sys
from typing import NamedTuple

import chex
import jax
import numpy as np

from deltajax.config import (
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.training.ahead import abstract_batch
from deltajax.training.collectives import count_collectives
from deltajax.training.mesh import make_sharding, place_batch
from deltajax.training.step import Trainer

MESHES = ((8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 1, 2))


class Layout(NamedTuple):
  """How a model is run on 8 devices.

  Attributes:
    mesh: sizes of its axes.
    depth_attention: None or a kernel, interpreted.
    read_group: layers that read together.
  """

  mesh: tuple[int, ...] = (2, 2, 1, 2)
  depth_attention: str | None = None
  read_group: int = 1


TPU = Layout(depth_attention="interpret")
GPU = Layout(depth_attention="interpret_triton")
ALONE = tuple(map(Layout, MESHES))
LAYOUTS = {
  "standard": ALONE,
  "delta_block": (*ALONE, TPU),
  "delta": (*ALONE, GPU, TPU._replace(read_group=2)),
  "attnres_block": (*ALONE, GPU),
  "attnres_full": (TPU, GPU._replace(read_group=2), Layout(read_group=4)),
  "rd_delta_block": (*ALONE, TPU, GPU),
}


def run_config(variant, mesh, depth_attention=None, read_group=1):
  data, fsdp, tensor, context = mesh
  return RunConfig(
    model=ModelConfig(
      vocab_size=32,
      width=16,
      num_layers=4,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      mlp_width=32,
      dtype="float32",
      remat="full",
      depth_attention=depth_attention,
      read_group=read_group,
      routing=RoutingConfig(
        variant=variant,
        num_blocks=2,
        query_init_std=0.0 if variant == "standard" else 0.5,
      ),
    ),
    # A large epsilon: updates are smooth in the gradient, not its sign.
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=0, eps=1e-3),
    training=TrainingConfig(batch_size=16, accumulation=2, z_loss=1e-3),
    mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor, context=context),
  )


def random_rows():
  rng = np.random.default_rng(0)
  shape = (16, 17)
  segments = np.sort(rng.integers(0, 4, shape), axis=1)[:, ::-1]
  return {
    "tokens": rng.integers(0, 32, shape).astype(np.int32),
    "segment_ids": np.ascontiguousarray(segments).astype(np.int32),
    "positions": np.broadcast_to(np.arange(17, dtype=np.int32), shape),
  }


def two_updates(config, devices):
  sharding = make_sharding(config, devices)
  trainer = Trainer(config, sharding)
  state = trainer.compiled_init()
  update = trainer.jit_update()
  losses = []
  for _ in range(2):
    batch = place_batch(sharding, random_rows(), 16)
    state, metrics = update(state, batch)
    losses.append(float(metrics["train/loss"]))
  layout = jax.tree.map(lambda x: x.sharding, state)
  assert layout == jax.tree.map(lambda x: x.sharding, trainer.abstract_state())
  check_state_is_split(state, config.mesh)
  return losses, jax.device_get(state.params)


def check_state_is_split(state, mesh):
  """Every matrix, and its moments, lies in as many parts as fsdp x tensor."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  matrices = [
    (jax.tree_util.keystr(path), x)
    for path, x in leaves
    if "kernel" in str(path) or "embedding" in str(path)
  ]
  assert len(matrices) == 3 * 8  # Parameters and two moments.
  for name, x in matrices:
    parts = x.size // x.addressable_shards[0].data.size
    assert parts == mesh.fsdp * mesh.tensor, name
  scales = [x for path, x in leaves if "attention_norm" in str(path)]
  assert len(scales) == 3
  for x in scales:
    assert x.size // x.addressable_shards[0].data.size == mesh.fsdp


def check_collectives(config):
  """Parameters may be gathered and gradients summed; sources stay at home."""
  trainer = Trainer(config, make_sharding(config, jax.devices()))
  lowered = trainer.jit_update().lower(
    trainer.abstract_state(), abstract_batch(trainer)
  )
  text = lowered.compile().as_text()
  found = {x.kind: x for x in count_collectives(text)}
  # None for each source of a read: those loops end when the data say so.
  assert not any(x.data_dependent for x in found.values()), found
  if config.mesh.fsdp == config.mesh.tensor == 1:
    assert set(found) == {"all-reduce"}, found
  params = jax.tree.leaves(trainer.abstract_state().params)
  largest = 4 * max(x.size for x in params)
  tokens = config.training.batch_size // config.training.accumulation
  one_source = 4 * tokens * config.data.sequence_length * config.model.width
  assert largest < one_source
  sizes = [
    4 * math.prod(map(int, shape.split(",")))
    for line in text.splitlines()
    if " all-gather" in line
    for shape in re.findall(r"f32\[([\d,]+)\]", line.split("(")[0])
  ]
  assert max(sizes, default=0) <= largest


def main(variants):
  assert len(jax.devices()) == 8
  for variant in variants:
    for mesh in ((8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1)):
      check_collectives(run_config(variant, mesh))
    one = run_config(variant, (1, 1, 1, 1))
    losses, params = two_updates(one, jax.devices()[:1])
    for layout in LAYOUTS[variant]:
      found = two_updates(run_config(variant, *layout), jax.devices())
      np.testing.assert_allclose(found[0], losses, rtol=1e-5)
      chex.assert_trees_all_close(found[1], params, rtol=1e-5, atol=1e-5)
      print("equal", variant, layout, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:] or LAYOUTS)
