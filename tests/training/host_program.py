"""One host of a run: python -m tests.training.host_program JSON."""

import json
import pathlib
import sys
from unittest import mock

from deltajax.config import HostsConfig, MeshConfig
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.training.loop import train
from tests.training.test_loop import tiny_config
from train.pretrain import print_report


def main(options):
  index = options["index"]
  hosts = HostsConfig()
  if options["count"] > 1:
    hosts = HostsConfig(
      cluster="explicit",
      coordinator=f"127.0.0.1:{options['port']}",
      count=options["count"],
      index=index,
    )
  different = {k: x[index] for k, x in options.get("different", {}).items()}
  model = options.get("model", {})
  model |= {k: x for k, x in different.items() if k == "dtype"}
  training = {k: x for k, x in different.items() if k == "seed"}
  training |= {k: options[k] for k in ("steps",) if k in options}
  config = tiny_config(
    options["corpus"],
    stop_after=options.get("stop_after"),
    mesh=MeshConfig(**options.get("mesh", {"data": -1})),
    hosts=hosts,
    model=model,
    **training,
  )
  workdir = pathlib.Path(options["workdir"])
  with mock.patch.object(
    ByteTokenizer, "encode", autospec=True, side_effect=ByteTokenizer.encode
  ) as encode:
    result = train(config, workdir, lambda x: print(x, flush=True))
  print(f"encoded {encode.call_count} texts")
  print_report(result)


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
