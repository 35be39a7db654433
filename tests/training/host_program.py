"""One host of a run: python -m tests.training.host_program JSON."""

import json
import pathlib
from unittest import mock

from deltajax.config import HostsConfig, MeshConfig
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.training.loop import train
from tests.training.test_loop import tiny_config
from train.cli import main as exit_with_message
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

    def report(result):
      print(f"encoded {encode.call_count} texts")
      print_report(result)

    train(config, workdir, lambda x: print(x, flush=True), on_end=report)


if __name__ == "__main__":
  exit_with_message(lambda arguments: main(json.loads(arguments[0])))
