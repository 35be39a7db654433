"""A whole study of tiny models, as a user runs it."""

import functools

import pytest

from deltajax.comparison.study_tables import with_measured
from tests.helpers import QUICK_FLAGS, run_module

run = functools.partial(
  run_module, "train.study", env={"XLA_FLAGS": QUICK_FLAGS}
)

CONFIG = """
from deltajax.comparison.plan import Comparison
from deltajax.comparison.study import Study
from tests.training.test_loop import tiny_config


def get_config():
  return Study(
    comparison=Comparison(
      base=tiny_config("{corpus}", steps=8, eval_every=8, eval_routing=False),
      arms={{
        "standard": {{"model.routing.variant": "standard"}},
        "delta_block": {{"model.routing.variant": "delta_block"}},
      }},
      baseline="standard",
      seeds=(0,),
    ),
    candidates={{
      "dies": {{"optimizer.learning_rate": 1e30, "health.skip_limit": 0}},
      "low": {{"optimizer.learning_rate": 1e-5}},
      "high": {{"optimizer.learning_rate": 1e-2}},
    }},
    groups={{"delta_block": ("standard", "delta_block")}},
    tuning_seed=1,
    analysed_seed=0,
  )
"""
DOCUMENT = "# Mine\n\n<!-- measured -->\nold\n<!-- end -->\n\nProse.\n"


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
  path = tmp_path_factory.mktemp("configs") / "study_tiny.py"
  path.write_text(CONFIG.format(corpus=corpus))
  return path


def test_tunes_compares_looks_inside_and_writes(config, tmp_path):
  document, out = tmp_path / "mine.md", tmp_path / "out"
  document.write_text(DOCUMENT)
  arguments = (config, "--out", out, "--document", document)
  done = run(*arguments)
  assert done.returncode == 0, done.stderr
  # The low rate learns nothing in eight updates.
  assert "delta_block: high, for standard, delta_block" in done.stdout
  left_out = "Left out, because they died: delta_block+dies seed"
  assert left_out in (out / "tuning/comparison.md").read_text()
  text = (out / "study.md").read_text()
  for part in (
    "| arm | dies | low | high | used by |",
    "| delta_block | died | ",
    "| delta_block | standard | ",
    "hours, on 1 x cpu",
    "below 0, the arm is better",
    "(comparison/figures/differences.png)",
  ):
    assert part in text, (part, text)
  written = document.read_text()
  assert written.startswith("# Mine\n\n<!-- measured -->\n\n")
  assert written.endswith("<!-- end -->\n\nProse.\n")
  assert "old" not in written
  assert "(figures/mine-differences.png)" in written
  assert (tmp_path / "figures/mine-curves.png").stat().st_size > 1000
  again = run(*arguments)
  assert again.returncode == 0, again.stderr
  # But for the one that died, nothing is done again, the analysis neither.
  assert again.stdout.count("run       ") == 1
  assert "numbers   out/routing" not in relative(again.stdout, tmp_path)
  assert document.read_text() == written

  # Another model of the same name is looked into anew.
  outcome = out / "comparison/runs/delta_block/seed-0/outcome.json"
  outcome.write_text(
    outcome.read_text().replace('"skipped": 0', '"skipped": 1')
  )
  other = run(*arguments)
  assert other.returncode == 0, other.stderr
  assert "numbers   out/routing" in relative(other.stdout, tmp_path)


def relative(text, path):
  return text.replace(f"{path}/", "")


def test_what_is_measured_is_replaced(tmp_path):
  document = tmp_path / "mine.md"
  document.write_text(DOCUMENT)
  once = with_measured(document, "new")
  assert once == (
    "# Mine\n\n<!-- measured -->\n\nnew\n\n<!-- end -->\n\nProse.\n"
  )
  document.write_text(once)
  assert with_measured(document, "new") == once
