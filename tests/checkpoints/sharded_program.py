"""Run in a process with 8 CPU devices: parameters are read onto meshes."""

import pathlib
import tempfile

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from deltajax.checkpoints.arrays import assemble
from deltajax.checkpoints.huggingface import (
  load_config,
  load_pretrained,
  save_pretrained,
)
from deltajax.checkpoints.tensor_files import TensorFiles
from deltajax.config import (
  MeshConfig,
  ModelConfig,
  RoutingConfig,
  RunConfig,
  TrainingConfig,
)
from deltajax.training.step import Trainer
from tests.helpers import random_params

MODEL = ModelConfig(
  vocab_size=32,
  width=16,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=32,
  tie_embeddings=False,
  attention_bias=True,
  mlp_bias=True,
  qk_norm=False,
  routing=RoutingConfig(variant="standard"),
)
ROUTING = RoutingConfig(variant="delta_block", num_blocks=3, gate="scalar")


def check(directory, mesh: MeshConfig) -> None:
  model = load_config(directory, ROUTING)
  run = RunConfig(
    model=model, mesh=mesh, training=TrainingConfig(batch_size=16)
  )
  like = Trainer(run).abstract_state().params
  reads = []
  read = TensorFiles.read
  TensorFiles.read = lambda files, name: reads.append(name) or read(files, name)
  found = load_pretrained(
    directory, ROUTING, shardings=jax.tree.map(lambda x: x.sharding, like)
  )
  TensorFiles.read = read
  assert len(reads) == len(set(reads)), "a tensor was read twice"
  expected = load_pretrained(directory, ROUTING).params

  def compare(path, x, like, whole):
    assert x.sharding.is_equivalent_to(like.sharding, x.ndim), path
    np.testing.assert_array_equal(x, whole, err_msg=str(path))

  jax.tree_util.tree_map_with_path(compare, found.params, like, expected)
  print(mesh, "equal")


def check_split_layers() -> None:
  """Nothing here splits layers over devices, but a sharding may."""
  mesh = jax.make_mesh((4, 2), ("stage", "fsdp"))
  sharding = NamedSharding(mesh, PartitionSpec("stage", None, "fsdp"))
  expected = np.arange(8 * 3 * 4, dtype=np.float32).reshape(8, 3, 4)
  found = assemble(
    [lambda x=x: x for x in expected],
    expected.shape,
    "float32",
    stacked=True,
    sharding=sharding,
  )
  assert found.sharding == sharding
  np.testing.assert_array_equal(found, expected)
  print("split layers equal")


def main() -> None:
  """Checks several meshes."""
  assert len(jax.devices()) == 8
  check_split_layers()
  with tempfile.TemporaryDirectory() as name:
    directory = pathlib.Path(name) / "model"
    save_pretrained(directory, MODEL, random_params(MODEL))
    for mesh in (
      MeshConfig(fsdp=8),
      MeshConfig(data=2, fsdp=2, tensor=2),
      MeshConfig(data=8),
    ):
      check(directory, mesh)


if __name__ == "__main__":
  main()
