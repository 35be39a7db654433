"""Directories and files that commands are given, good and bad ones.

Each is made once, when it is asked for: `Places(root, ...)["RUN"]`.
"""

import json
import pathlib
import shutil

import numpy as np

from deltajax.checkpoints.huggingface import save_pretrained
from deltajax.config import RoutingConfig
from deltajax.data.prepare import Corpus, prepare
from deltajax.data.split_plan import Fractions
from deltajax.training.loop import train
from tests.helpers import initial_params, ROOT, tiny_config
from tests.training import test_loop

MODELS = ROOT / "tests/testdata/huggingface"
LM_EVAL = ROOT / "tests/testdata/lm_eval"

CONFIG = """
from tests.training.test_loop import tiny_config


def get_config():
  return tiny_config({corpus!r})
"""
COMPARISON = """
from deltajax.comparison.plan import Comparison
from tests.training.test_loop import tiny_config


def get_config():
  return Comparison(
    base=tiny_config({corpus!r}),
    arms={{
      "parent": {{"model.routing.variant": "attnres_block"}},
      "tied": {{"model.routing.variant": "rd_tied"}},
    }},
    baseline="parent",
    seeds=(0,),
  )
"""
STUDY = """
from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study
from tests.training.test_loop import tiny_config


def get_config():
  return Study(
    comparison=Comparison(
      base=tiny_config({corpus!r}),
      arms={{
        "standard": {{"model.routing.variant": "standard"}},
        "delta_block": {{"model.routing.variant": "delta_block"}},
      }},
      baseline="standard",
      seeds=(0,),
    ),
    candidates={{"low": {{"optimizer.learning_rate": 1e-5}}}},
    groups={{"delta_block": ("standard", "delta_block")}},
    tuning_seed=1,
    analysed_seed=0,
  )
"""
# Config files that cannot be used.
BAD_CONFIGS = {
  "SYNTAX": "def get_config(:\n",
  "RAISES": "def get_config():\n  return 1 / 0\n",
  "NO_FUNCTION": "config = 1\n",
  "NO_CONFIG": "def get_config():\n  return {}\n",
}


def make_run(corpus, workdir, **options):
  """A run of two updates and two checkpoints."""
  config = test_loop.tiny_config(
    corpus,
    optimizer={"warmup_steps": 1},
    steps=2,
    checkpoint_every=1,
    eval_every=2,
    **options,
  )
  train(config, workdir, test_loop.quiet)
  return workdir


def save_model(path, vocab_size=259, variant="standard"):
  """A model directory in deltajax's own layout, without a tokenizer."""
  config = tiny_config(
    variant,
    vocab_size=vocab_size,
    num_layers=2,
    num_blocks=2,
    dtype="float32",
    param_dtype="float32",
  )
  save_pretrained(path, config, initial_params(config), layout="deltajax")
  return path


class Places:
  """Paths by name, made when they are first asked for.

  Args:
    root: where they are made.
    corpus: a TFDS directory of texts.
    tokenizer: a directory with a tokenizer.json.
  """

  def __init__(self, root, corpus, tokenizer):
    self.root, self.corpus, self.tokenizer = root, corpus, tokenizer
    self._made = {}

  def __contains__(self, name):
    return name in BAD_CONFIGS or hasattr(self, f"_{name.lower()}")

  def __getitem__(self, name):
    if name not in self._made:
      if name in BAD_CONFIGS:
        made = self._file(f"{name.lower()}.py", BAD_CONFIGS[name])
      else:
        made = getattr(self, f"_{name.lower()}")()
      self._made[name] = made
    return str(self._made[name])

  def _file(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
    return path

  def _copy(self, model, name):
    return pathlib.Path(shutil.copytree(MODELS / model, self.root / name))

  # Configs.

  def _tiny(self):
    return self._file("tiny.py", CONFIG.format(corpus=str(self.corpus)))

  def _comparison(self):
    text = COMPARISON.format(corpus=str(self.corpus))
    return self._file("comparison.py", text)

  def _study(self):
    return self._file("study.py", STUDY.format(corpus=str(self.corpus)))

  # Data.

  def _corpus(self):
    return self.corpus

  def _tokenizer(self):
    return self.tokenizer

  def _texts(self):
    lines = [
      json.dumps({"text": f"line {i} of a text. " * 3}) for i in range(9)
    ]
    return self._file("texts.jsonl", "\n".join(lines))

  def _empty(self):
    return self._file("empty.jsonl", '{"text": ""}\n')

  def _nothing(self):
    return self._file("nothing/nothing.jsonl", "")

  def _no_files(self):
    path = self.root / "no_files"
    path.mkdir()
    return path

  def _broken(self):
    return self._file("broken.jsonl", '{"text": "a"}\n' * 3 + "broken\n")

  def _not_utf8(self):
    return self._file("not_utf8.txt", b"good \xff bad")

  def _long(self):
    return self._file("long.txt", "x" * 2000)

  def _torn(self):
    return self._file("torn.parquet", b"PAR1 torn")

  def _columns(self):
    import pyarrow
    import pyarrow.parquet

    path = self.root / "columns.parquet"
    table = pyarrow.table({"content": ["a"], "number": [1]})
    pyarrow.parquet.write_table(table, path)
    return path

  def _prepared(self):
    """A packed set for other sequences than the run's."""
    corpus = Corpus(
      sources=(self["TEXTS"],),
      tokenizer="bytes",
      sequence_length=20,
      fractions=Fractions(validation=0.3, test=0.3),
    )
    out = self.root / "prepared"
    prepare(corpus, out, workers=0, log=test_loop.quiet)
    return out

  # Models and runs.

  def _run(self):
    routing = RoutingConfig(variant="delta_block", num_blocks=2)
    model = {"routing": routing, "num_kv_heads": 2, "vocab_size": 260}
    return make_run(self.corpus, self.root / "run", model=model)

  def _shorter(self):
    """The same run on other data, as far as its config says."""
    path = self.root / "shorter"
    shutil.copytree(self["RUN"], path)
    values = json.loads((path / "config.json").read_text())
    values["data"]["sequence_length"] = 16
    (path / "config.json").write_text(json.dumps(values))
    return path

  def _without_checkpoints(self):
    path = self.root / "without_checkpoints"
    shutil.copytree(self["RUN"], path)
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoints").mkdir()
    return path

  def _model(self):
    return save_model(self.root / "model")

  def _routed(self):
    return save_model(self.root / "routed", variant="delta_block")

  def _small(self):
    return save_model(self.root / "small", vocab_size=100)

  def _other(self):
    """A model with a tokenizer of its own."""
    path = save_model(self.root / "other", vocab_size=300)
    for file in pathlib.Path(self.tokenizer).iterdir():
      shutil.copy(file, path)
    return path

  def _qwen3(self):
    return MODELS / "qwen3-tied"

  def _lmeval(self):
    return LM_EVAL / "model"

  def _tasks(self):
    return LM_EVAL / "tasks"

  def _missing_shard(self):
    path = self._copy("qwen3-untied", "missing_shard")
    (path / "model-00002-of-00005.safetensors").unlink()
    return path

  def _truncated(self):
    path = self._copy("qwen3-tied", "truncated")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return path

  def _absent_tensor(self):
    path = self._copy("qwen3-untied", "absent_tensor")
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.absent.weight"] = (
      "model-00001-of-00005.safetensors"
    )
    index.write_text(json.dumps(values))
    return path

  def _other_config(self, name, **changes):
    path = self._copy("qwen3-tied", name)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path

  def _head_dim(self):
    return self._other_config("head_dim", head_dim=4)

  def _gpt2(self):
    return self._other_config("gpt2", model_type="gpt2")

  def _yarn(self):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    return self._other_config("yarn", rope_parameters=rope)

  def _large_tokenizer(self):
    path = self._copy("qwen3-tied", "large_tokenizer")
    vocab = {f"t{i}": i for i in range(99)}
    values = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(values))
    return path

  def _pickled(self):
    path = self._copy("qwen3-tied", "pickled")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(np.zeros(3).tobytes())
    return path

  # Places that cannot be written to.

  def _file_there(self):
    return self._file("file_there", "mine")

  def _occupied(self):
    return self._file("occupied/mine.txt", "mine").parent
