"""Brings models in, gives routing to them, and takes them out again.

    python -m train.convert import DIR OUT --routing.variant delta_block \\
        --routing.gate scalar
    python -m train.convert export RUN_OR_DIR OUT
    python -m train.convert inspect RUN_OR_DIR

`import` reads a model directory of transformers (Qwen3, Llama) or of the
released AttnRes code, and writes one of deltajax, which can hold any routing.
`export` writes the newest checkpoint of a run, one of its checkpoints, or a
model directory for other programs. Both run on the CPU.
"""

import dataclasses
import pathlib
import sys
from typing import Annotated, Any, ClassVar

import jax
import tyro

from deltajax.checkpoints.conversion import is_exact, probe
from deltajax.checkpoints.huggingface import (
  add_routing,
  check_save,
  check_tensors,
  load_config,
  load_pretrained,
  Pretrained,
  save_pretrained,
)
from deltajax.checkpoints.names import count_parameters, parameter_shapes
from deltajax.checkpoints.tensor_files import TensorFiles
from deltajax.config import ConfigError, ModelConfig, RoutingConfig
from deltajax.training.load import find_model, ModelDirectory
from deltajax.training.stopping import RUN_ERROR
from train.cli import main, parse_subcommand, Subcommand

STANDARD = RoutingConfig(variant="standard")

Source = tyro.conf.Positional[
  Annotated[pathlib.Path, tyro.conf.arg(metavar="RUN_OR_DIR")]
]
Out = tyro.conf.Positional[
  Annotated[pathlib.Path, tyro.conf.arg(metavar="OUT")]
]


@dataclasses.dataclass(frozen=True)
class Import:
  """Writes a model of transformers as one of deltajax.

      python -m train.convert import DIR OUT --routing.variant delta_block \\
          --routing.gate scalar

  An additive variant with `--routing.gate scalar` starts as the very model that
  was read, bit for bit; that is checked before anything is written.

  Attributes:
    directory: config.json, safetensors, and a tokenizer's files.
    out: the directory that is written.
    routing: what a standard model is given; `standard` leaves it as it is.
    param_dtype: float32 or bfloat16; None for that of the files.
  """

  usage: ClassVar[str] = "DIR OUT [--routing.variant NAME ...]"

  directory: tyro.conf.Positional[
    Annotated[pathlib.Path, tyro.conf.arg(metavar="DIR")]
  ]
  out: Out
  routing: RoutingConfig = STANDARD
  param_dtype: str | None = None

  def run(self) -> None:
    """Converts, and says whether the model is still the same."""
    routing = None if self.routing.variant == "standard" else self.routing
    stored = load_config(self.directory)
    config = stored if routing is None else add_routing(stored, routing)
    saving: dict[str, Any] = {"layout": "deltajax", "like": self.directory}
    _check_apart(self.directory, self.out)
    check_save(self.out, config, **saving, dtype=self.param_dtype)
    model = load_pretrained(
      self.directory, routing, param_dtype=self.param_dtype
    )
    print("\n".join(model_lines(model.config)))
    if config.routing != stored.routing:
      _print_probes(model)
    save_pretrained(self.out, *model, **saving)
    print(f"written   {self.out}")


@dataclasses.dataclass(frozen=True)
class Export:
  """Writes a model for other programs, or says why they cannot hold it.

  Attributes:
    source: a run, one of its checkpoints, or a model directory.
    out: the directory that is written.
    layout: huggingface (a routed model: that of the released AttnRes code), or
      deltajax.
    like: a model directory whose tokenizer and token ids are carried along;
      by default the source, or the one that a run started with.
    dtype: of the tensors; None for that of the parameters.
  """

  usage: ClassVar[str] = "RUN_OR_DIR OUT [--layout NAME] [--dtype NAME]"

  source: Source
  out: Out
  layout: str = "huggingface"
  like: pathlib.Path | None = None
  dtype: str | None = None

  def run(self) -> None:
    """Exports."""
    source = find_model(self.source)
    like = self.like
    if like is None:
      like = source.origin
    saving: dict[str, Any] = {
      "layout": self.layout,
      "like": like,
      "dtype": self.dtype,
    }
    _check_apart(self.source, self.out)
    check_save(self.out, source.config(), **saving)
    model = source.load()
    print("\n".join([str(source), *model_lines(model.config)]))
    save_pretrained(self.out, *model, **saving)
    print(f"written   {self.out}")


@dataclasses.dataclass(frozen=True)
class Inspect:
  """Says what a model is, without loading its weights.

  Attributes:
    source: a run, one of its checkpoints, or a model directory.
  """

  usage: ClassVar[str] = "RUN_OR_DIR"

  source: Source

  def run(self) -> None:
    """Prints the model and its parameters."""
    source = find_model(self.source)
    config = source.config()
    stored = config.param_dtype
    if isinstance(source, ModelDirectory):
      with TensorFiles(source.path) as files:
        check_tensors(config, files, source.path)
        stored = " and ".join(sorted(set(files.dtypes.values())))
    print(f"{source}, stored as {stored}")
    print("\n".join([*model_lines(config), "", *parameter_lines(config)]))


def model_lines(config: ModelConfig) -> list[str]:
  """What a model is."""
  routing = config.routing
  options = {
    field.name: getattr(routing, field.name)
    for field in dataclasses.fields(routing)
    if getattr(routing, field.name) != field.default
  }
  if routing.row.block == "layers":
    options["num_blocks"] = routing.num_blocks
  options.pop("variant", None)
  count = count_parameters(parameter_shapes(config))
  switches = ("tie_embeddings", "qk_norm", "attention_bias", "mlp_bias")
  return [
    f"model     {config.num_layers} layers, width {config.width},"
    f" {config.num_heads} heads and {config.num_kv_heads} for keys, of"
    f" {config.head_dim}, mlp {config.mlp_width}, vocabulary"
    f" {config.vocab_size}"
    + "".join(f", {name}" for name in switches if getattr(config, name)),
    f"rotary    base {config.rope_theta:g}, scaling {config.rope_scaling.kind}",
    f"routing   {routing.variant}: {routing.row.summary}"
    + "".join(f"; {name} {value}" for name, value in options.items()),
    f"size      {count}",
  ]


def parameter_lines(config: ModelConfig) -> list[str]:
  """Path and shape of every parameter."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  rows = [("/".join(key.key for key in path), x.shape) for path, x in leaves]
  width = max(len(name) for name, _ in rows)
  return [f"{name:<{width}}  {list(shape)}" for name, shape in rows]


def _check_apart(source: pathlib.Path, out: pathlib.Path) -> None:
  if out.resolve() == source.resolve():
    raise ConfigError(f"{out} is what is read; name another directory.")


def _print_probes(model: Pretrained) -> None:
  """Raises SystemExit if a model that must equal its base does not."""
  print("step 0    logits beside those of the model that was read, on a probe:")
  probes = [probe(*model, dtype=dtype) for dtype in ("bfloat16", "float32")]
  for found in probes:
    print(f"          {found}")
  if is_exact(model.config.routing) and not all(x.equal for x in probes):
    print("error: they must be equal; nothing was written", file=sys.stderr)
    raise SystemExit(RUN_ERROR)


SUBCOMMANDS: dict[str, type[Subcommand]] = {
  "import": Import,
  "export": Export,
  "inspect": Inspect,
}


def parse(arguments: list[str]) -> Subcommand:
  """Parses the command line."""
  command = "python -m train.convert"
  return parse_subcommand(command, SUBCOMMANDS, arguments, __doc__)


def command(arguments: list[str]) -> None:
  """Runs one of the subcommands."""
  jax.config.update("jax_platforms", "cpu")
  parse(arguments).run()


if __name__ == "__main__":
  main(command, resumes=False)
