"""What a build of deltajax holds, and what an installation of it can do.

    python .ci/check_package.py files dist    # of wheel and sdist
    python .ci/check_package.py core          # in an environment without extras
    python .ci/check_package.py train         # in one with this extra

`.ci/package` makes the environments.
"""

from collections.abc import Callable
import importlib.util
import pathlib
import pkgutil
import sys
import tarfile
import tempfile
import tomllib
import zipfile

# What nobody should have who asked for nothing of it.
HEAVY = (
  *("array_record", "grain", "huggingface_hub", "lm_eval", "matplotlib"),
  *("orbax", "pyarrow", "safetensors", "tensorboardX", "tensorflow"),
  *("tensorflow_datasets", "tokenizers", "torch", "transformers", "wandb"),
  "libtpu",
)
NEVER = ("tensorflow", "torch", "transformers")
# Flax brings these along.
COMES_WITH_FLAX = ("orbax",)


def files(directory: str) -> None:
  """Wheel and sdist hold what they should, and one version."""
  (wheel,) = pathlib.Path(directory).glob("*.whl")
  (sdist,) = pathlib.Path(directory).glob("*.tar.gz")
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (info,) = {x.split("/")[0] for x in names if ".dist-info/" in x}
    metadata = archive.read(f"{info}/METADATA").decode()
    init = archive.read("deltajax/__init__.py").decode()
  assert "deltajax/py.typed" in names
  assert f"{info}/licenses/LICENSE" in names
  assert {x.split("/")[0] for x in names} == {"deltajax", info}, names
  sources = pathlib.Path("deltajax").rglob("*.py")
  assert {str(x) for x in sources} <= set(names)
  version = info.removeprefix("deltajax-").removesuffix(".dist-info")
  assert f'__version__ = "{version}"' in init
  assert f"\nVersion: {version}\n" in metadata
  assert "\nLicense-Expression: Apache-2.0\n" in metadata
  assert "# deltajax" in metadata  # The README.
  project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
  for extra in project["optional-dependencies"]:
    assert f"\nProvides-Extra: {extra}\n" in metadata
  with tarfile.open(sdist) as archive:
    names = [x.partition("/")[2] for x in archive.getnames()]
  for name in (
    "LICENSE",
    "Makefile",
    "README.md",
    "configs/quickstart.py",
    "train/pretrain.py",
    "tests/conftest.py",
    "docs/index.md",
    "notebooks/quickstart.ipynb",
    ".ci/package",
    "tests/testdata/golden/block.safetensors",
  ):
    assert name in names, f"the sdist lacks {name}"
  print(f"files      {wheel.name}, {sdist.name}")


def here(names: tuple[str, ...]) -> list[str]:
  """Those of these packages that can be imported."""
  return [name for name in names if importlib.util.find_spec(name)]


def refused(call: Callable[[], object], words: str) -> None:
  """A call raises, and says these words."""
  try:
    call()
    said = "nothing"
  except Exception as error:
    said = str(error)
  assert words in said, said


def tiny():
  """A model of two layers that sees bytes."""
  import jax

  import deltajax

  config = deltajax.ModelConfig(
    vocab_size=259,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    dtype="float32",
    routing=deltajax.RoutingConfig(variant="delta_block", num_blocks=2),
  )
  model = deltajax.TransformerLM(config)
  tokens = jax.numpy.arange(16).reshape(2, 8)
  from flax import linen

  params = linen.meta.unbox(jax.jit(model.init)(jax.random.key(0), tokens))
  return config, model, params["params"], tokens


def core() -> None:
  """Models run, generate and are evaluated; nothing heavy came along."""
  import jax

  import deltajax

  config, model, params, tokens = tiny()
  logits = jax.jit(model.apply)({"params": params}, tokens).logits_BxTxV
  assert logits.shape == (2, 8, config.vocab_size)
  new = deltajax.generate(
    model, params, [[1, 2, 3]], max_new_tokens=4, temperature=0.0
  )
  assert len(new[0]) == 4
  quality = deltajax.evaluate(model, params, [[1, 2, 3, 4]], context=4)
  assert quality.loss.value > 0
  found = set(here(HEAVY)) - set(COMES_WITH_FLAX)
  assert not found, found
  refused(
    lambda: deltajax.save_pretrained("x", config, params, layout="deltajax"),
    "pip install 'deltajax[pretrained]'",
  )


def data() -> None:
  """A corpus is packed and read."""
  import pyarrow
  import pyarrow.parquet

  from deltajax.data.packed_dataset import open_packed
  from deltajax.data.prepare import Corpus, prepare
  from deltajax.data.split_plan import Fractions

  with tempfile.TemporaryDirectory() as scratch:
    root = pathlib.Path(scratch)
    texts = [f"document {i} of a corpus. " * 9 for i in range(99)]
    pyarrow.parquet.write_table(
      pyarrow.table({"text": texts}), root / "a.parquet"
    )
    corpus = Corpus(
      sources=(str(root / "a.parquet"),),
      tokenizer="bytes",
      sequence_length=32,
      fractions=Fractions(validation=0.2, test=0.2),
    )
    prepare(corpus, root / "out", workers=0, log=lambda line: None)
    assert open_packed(root / "out", "train")[0]["tokens"].shape == (33,)


def pretrained() -> None:
  """Model directories are written and read."""
  import deltajax

  config, _, params, _ = tiny()
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch) / "model"
    deltajax.save_pretrained(directory, config, params, layout="deltajax")
    found = deltajax.load_pretrained(directory)
  assert found.config.routing == config.routing
  import huggingface_hub  # noqa: F401
  import tokenizers  # noqa: F401


def train() -> None:
  """A run trains, checkpoints and is resumed."""
  from deltajax.config import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
  )
  from deltajax.training.loop import train as run

  with tempfile.TemporaryDirectory() as scratch:
    root = pathlib.Path(scratch)
    lines = [f"value_{i} = {i} * {i}\n" * 9 for i in range(99)]
    (root / "texts").mkdir()
    for i, line in enumerate(lines):
      (root / f"texts/{i}.txt").write_text(line)
    config = RunConfig(
      model=tiny()[0],
      data=DataConfig(
        dataset=f"{root}/texts", data_dir=f"{root}/data", sequence_length=16
      ),
      optimizer=OptimizerConfig(warmup_steps=1),
      training=TrainingConfig(
        steps=2, batch_size=2, eval_every=2, eval_sequences=2
      ),
    )
    result = run(config, root / "run")
    assert result.step == 2
    assert (root / "run/checkpoints/2").is_dir()
    assert list((root / "run/tensorboard").iterdir())


def wandb() -> None:
  """The package is there."""
  from deltajax.training.metrics import import_wandb

  import_wandb()


def analysis() -> None:
  """Schedules are drawn, and matplotlib is there for figures."""
  from deltajax.analysis import figures
  from deltajax.comparison import paired  # noqa: F401

  figures.check_matplotlib()
  import scipy.stats  # noqa: F401


def eval_() -> None:
  """Tasks can be loaded."""
  from deltajax.evaluation.harness import HarnessLM  # noqa: F401
  from deltajax.evaluation.tasks import load_tasks

  refused(lambda: load_tasks(["no_such_task"]), "unknown task 'no_such_task'")


def tpu() -> None:
  """A topology can be described without a TPU."""
  from deltajax.training.targets import get_target

  assert len(get_target("v5e:4x4").devices) == 16


CHECKS: dict[str, Callable[[], None]] = {
  "core": core,
  "data": data,
  "pretrained": pretrained,
  "train": train,
  "wandb": wandb,
  "analysis": analysis,
  "eval": eval_,
  "tpu": tpu,
}


def main(arguments: list[str]) -> None:
  """Runs a check."""
  name, *rest = arguments
  if name == "files":
    files(*rest)
    return
  import deltajax

  place = pathlib.Path(deltajax.__file__)
  assert "site-packages" in place.parts, place
  CHECKS[name]()
  never = here(NEVER)
  assert not never, never
  modules = [x.name for x in pkgutil.walk_packages(deltajax.__path__)]
  print(f"{name:<11}deltajax {deltajax.__version__}, {len(modules)} packages")


if __name__ == "__main__":
  main(sys.argv[1:])
