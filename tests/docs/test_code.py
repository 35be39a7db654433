"""Code in the pages: Python runs, options of commands exist."""

import dataclasses
import importlib
import re
import shlex
import tomllib
import typing
from unittest import mock

import pytest

import deltajax
from deltajax.config import RunConfig
from deltajax.data.prepare import Corpus
from deltajax.data.tokenizers import get_tokenizer
from deltajax.routing import variants
from tests.docs.pages import code, entry, PAGES, ROOT
from tests.helpers import random_params, tiny_config
from tests.test_readme import write_fineweb_edu
from train import cli

MODEL = ROOT / "tests/testdata/huggingface/llama-tied"
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n```python\n")
PYTHON = {
  page: re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
  for page, path in PAGES.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A model directory where the pages have `runs/smollm2`."""
  directory = tmp_path_factory.mktemp("models") / "smollm2"
  config = tiny_config("standard", dtype="float32", param_dtype="float32")
  deltajax.save_pretrained(directory, config, random_params(config))
  return directory


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]])
@pytest.mark.usefixtures("quick_compiles")
def test_python_runs(page, model, tmp_path, monkeypatch):
  """Blocks of a page one after the other, where a run and a model are."""
  text = PAGES[page].read_text()
  runnable = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", text, re.M | re.S)
  assert len(runnable) + len(NOT_RUN.findall(text)) == len(PYTHON[page])
  run = tmp_path / "runs/quickstart"
  run.mkdir(parents=True)
  (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
  (tmp_path / "runs/smollm2").symlink_to(model)
  write_fineweb_edu(tmp_path / "fineweb-edu", 100)
  monkeypatch.chdir(tmp_path)
  names = {"__name__": "page"}
  with example_variant():
    for block in runnable:
      exec(compile(block, page, "exec"), names)


def test_a_tokenizer_is_trained_on_the_corpus(tmp_path, monkeypatch):
  write_fineweb_edu(tmp_path / "fineweb-edu", 100)
  monkeypatch.chdir(tmp_path)
  (block,) = PYTHON["docs/data.md"]
  exec(compile(block, "docs/data.md", "exec"), {})
  tokenizer = get_tokenizer("data/bpe_32k")
  assert len(tokenizer.encode("Document 12 of a corpus.")) < 12
  assert tokenizer.bos_id == tokenizer.eos_id


def test_blocks_that_cannot_run_are_counted():
  assert sum(len(NOT_RUN.findall(x.read_text())) for x in PAGES.values()) == 1


def example_variant():
  """The context in which the row of docs/add_a_variant.md is there."""
  row = entry(
    "add_a_variant.md", "deltajax/routing/variants.py", vars(variants)
  )
  return mock.patch.object(variants, "VARIANTS", {**variants.VARIANTS, **row})


# Up to what ends a command in a shell, or a quotation around it.
COMMAND = re.compile(
  r"(?:^|[\s/$])python -m (train\.\w+)((?: +(?:'[^'\n]*'|\"[^\"\n]*\""
  r"|[^\s;|#'\"`]+))+)",
  re.MULTILINE,
)
STAND_IN = {"configs/...": "configs/quickstart.py"}


def commands(page):
  """(module, arguments) of the commands of a page."""
  return [
    (module, [STAND_IN.get(x, x) for x in shlex.split(rest)])
    for block in code(PAGES[page].read_text())
    for module, rest in COMMAND.findall(block)
  ]


def parse(module, arguments):
  if module == "train.finetune":
    place = arguments.index("--init-from") + 1
    arguments[place] = str(MODEL)
  importlib.import_module(module).parse(arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_options_of_commands_exist(page, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  seen = []
  with example_variant():
    for module, arguments in commands(page):
      if (module, arguments) in seen:
        continue
      seen.append((module, list(arguments)))
      try:
        parse(module, arguments)
      except SystemExit:
        said = capsys.readouterr()
        pytest.fail(f"{module} {arguments}: {said.out}{said.err}")
      except cli.ConfigError as error:
        pytest.fail(f"{module} {arguments}: {error}")


def test_commands_are_found():
  """The pattern itself: continued, quoted, in a loop, in a line."""
  text = """
    until python -m train.pretrain configs/a.py --workdir x; do
      ssh --command '~/venv/bin/python -m train.pretrain \\
          configs/b.py --workdir y'

Or `python -m train.generate DIR --prompt "a b"`, not `python -m train.x`.
"""
  found = [
    (module, shlex.split(rest))
    for block in code("\n" + text)
    for module, rest in COMMAND.findall(block)
  ]
  assert found == [
    ("train.pretrain", ["configs/a.py", "--workdir", "x"]),
    ("train.pretrain", ["configs/b.py", "--workdir", "y"]),
    ("train.generate", ["DIR", "--prompt", "a b"]),
  ]


@pytest.mark.parametrize("page", PAGES)
def test_scripts_targets_and_extras_exist(page):
  targets = set(
    re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)
  )
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"].keys()
  for block in code(PAGES[page].read_text()):
    for target in re.findall(r"^\s*make ([a-z][\w-]*)", block, re.M):
      assert target in targets, target
    for names in re.findall(r"(?:\.|deltajax)\[([a-z,]+)\]", block):
      assert set(names.split(",")) <= extras, names
    for script, rest in re.findall(
      r"(benchmarks/\w+\.(?:py|sh)|docs/\w+\.py)([^\n;|#`]*)", block
    ):
      source = (ROOT / script).read_text()
      for option in re.findall(r"--([a-z][a-z-]*)", rest):
        known = (f"--{option}", option.replace("-", "_"))
        assert any(name in source for name in known), f"{script} --{option}"


# Of Slurm and gcloud.
OTHER_PROGRAMS = {
  *("--gpus-per-task", "--gpu-bind", "--accelerator-type"),
  *("--runtime-version", "--help"),
}


def config_options(cls, prefix="--"):
  """Every field of a config as an option."""
  for name, hint in typing.get_type_hints(cls).items():
    option = prefix + name.replace("_", "-")
    yield option
    if dataclasses.is_dataclass(hint):
      yield from config_options(hint, f"{option}.")


def test_options_in_lines_of_text_exist():
  parts_of_corpus = filter(
    dataclasses.is_dataclass, typing.get_type_hints(Corpus).values()
  )
  kinds = [RunConfig, Corpus, *parts_of_corpus]
  for path in ROOT.glob("train/*.py"):
    module = importlib.import_module(f"train.{path.stem}")
    kinds += [
      x
      for x in vars(module).values()
      if dataclasses.is_dataclass(x) and x.__module__ == module.__name__
    ]
  options = {option for kind in kinds for option in config_options(kind)}
  options |= {re.sub(r"^(--(?:.*\.)?)", r"\1no-", option) for option in options}
  scripts = "".join(
    path.read_text() for path in ROOT.glob("benchmarks/*.[ps][yh]")
  )
  for page, path in PAGES.items():
    for block in re.findall(r"`(--[^`\n]+)`", path.read_text()):
      # `--no-gradients`, not a value.
      assert not re.search(r" (?:True|False)\b", block), f"{page}: {block}"
      for option in re.findall(r"(?:^| )(--[a-z][\w.-]*)", block):
        field = option.removeprefix("--").replace("-", "_")
        in_script = option in scripts or f"  {field}: " in scripts
        assert option in options | OTHER_PROGRAMS or in_script, (
          f"{page}: {option}"
        )


def test_files_that_are_named_exist():
  """In lines of code of all pages: `deltajax/...py`, `configs/...py`."""
  rooms = "deltajax|train|configs|tests|benchmarks|docs"
  for page, path in PAGES.items():
    for block in code(path.read_text()):
      for file in re.findall(rf"\b((?:{rooms})/[\w/]+\.(?:py|sh|md))\b", block):
        assert (ROOT / file).exists(), f"{page}: {file}"
