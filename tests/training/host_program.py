"""One host of a run: python -m tests.training.host_program JSON."""

import json
import pathlib
import sys

from deltajax.config import HostsConfig, MeshConfig
from deltajax.training.loop import train
from tests.training.test_loop import tiny_config


def main(options):
  hosts = HostsConfig()
  if options["count"] > 1:
    hosts = HostsConfig(
      cluster="explicit",
      coordinator=f"127.0.0.1:{options['port']}",
      count=options["count"],
      index=options["index"],
    )
  config = tiny_config(
    options["corpus"],
    stop_after=options["stop_after"],
    mesh=MeshConfig(**options["mesh"]),
    hosts=hosts,
  )
  train(
    config, pathlib.Path(options["workdir"]), lambda x: print(x, flush=True)
  )


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
