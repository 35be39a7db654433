"""Run in a process with 8 CPU devices: parameters on a mesh generate alike."""

import json
import warnings

import jax
import numpy as np

import deltajax
from deltajax.training.mesh import make_sharding
from deltajax.training.step import Trainer
from tests.training.mesh_program import run_config


def main():
  # A donated cache that cannot be used again, because it lies elsewhere.
  warnings.simplefilter("error")
  jax.config.update("jax_disable_most_optimizations", True)
  found = []
  for mesh in ((1, 1, 1, 1), (1, 2, 2, 2)):
    config = run_config("rd_delta_block", mesh)
    devices = jax.devices()[: np.prod(mesh)]
    trainer = Trainer(config, make_sharding(config, devices))
    found.append(
      deltajax.generate(
        trainer.model,
        trainer.compiled_init().params,
        [[1, 2, 3], [4, 5, 6, 7, 8]],
        max_new_tokens=40,  # More steps than a CPU client holds at once.
        temperature=1.0,
        key=jax.random.key(0),
        stop_tokens=[31],
      ).tolist()
    )
  equal = all(tokens == found[0] for tokens in found)
  print(json.dumps({"devices": jax.device_count(), "equal": equal}))


if __name__ == "__main__":
  main()
