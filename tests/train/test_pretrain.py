"""The command as a user runs it."""

import functools
import re

import pytest

from tests.helpers import run_module


def override(*arguments):
  """Options of which later ones take the place of earlier ones."""
  pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
  return [x for pair in pairs.items() for x in pair]


run = functools.partial(run_module, "train.pretrain")


TINY = (
  *("--model.width", "16", "--model.num-layers", "2"),
  *("--model.num-heads", "2", "--model.num-kv-heads", "1"),
  *("--model.head-dim", "8", "--model.mlp-width", "16"),
  *("--model.routing.num-blocks", "2", "--data.sequence-length", "32"),
  *("--training.steps", "6", "--training.batch-size", "4"),
  *("--training.log-every", "2", "--training.eval-sequences", "8"),
  *("--optimizer.warmup-steps", "2"),
  # More ids than the tokenizer has: such ids must not be sampled.
  *("--model.vocab-size", "384"),
)


def test_trains_reports_and_resumes(corpus, tmp_path):
  arguments = (
    *("configs/quickstart.py", "--workdir", tmp_path / "run"),
    *("--data.dataset", corpus, *TINY),
  )
  done = run(*arguments)
  assert done.returncode == 0, done.stderr
  for part in (
    "routing   delta_block: u = p + mix",
    "model     2 layers, width 16",
    "data      ",
    "step 6/6  loss ",
    " tok/s",
    " after 6 updates",
    "\nsample:\ndef ",
    "layer 1 mlp",
    f"checkpoints  {tmp_path / 'run' / 'checkpoints'}",
  ):
    assert part in done.stdout, (part, done.stdout)
  again = run(*arguments)
  assert "resumed after 6 of 6 updates" in again.stdout
  other = run(*arguments, "--training.seed", "5")
  assert other.returncode == 2
  assert "training.seed: 0 in the run, 5 now" in other.stderr
  assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("configs/quickstrat.py",), "did you mean 'configs/quickstart.py'"),
    (("README.md",), "unknown config file 'README.md'"),
    (("configs/quickstart.py", "--model.widht", "4"), "--model.width"),
    (
      ("configs/quickstart.py", "--model.routing.variant", "delta_blok"),
      "did you mean 'delta_block'",
    ),
    (
      ("configs/quickstart.py", "--model.routing.num-blocks", "9"),
      "num_blocks is 9, more than the 8 layers",
    ),
    (
      ("configs/quickstart.py", "--mesh.data", "2", "--mesh.data=5"),
      "--mesh.data is given twice",
    ),
    (
      ("configs/paper_7_6b.py",),
      "mesh data=1, fsdp=64, tensor=1, context=1 needs 64 devices; there are 1",
    ),
    ((), "usage: python -m train.pretrain CONFIG"),
  ],
)
def test_user_errors_are_one_message(arguments, message, tmp_path):
  if arguments:
    arguments += ("--workdir", tmp_path / "run")
  done = run(*arguments)
  assert done.returncode == 2
  # The parser draws a box around its messages and wraps them.
  printed = re.sub(r"[│\s]+", " ", done.stderr + done.stdout)
  assert message in printed
  assert "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--data.sequence-length", "999999"), "split 'train' of .* 1000000"),
    (("--model.vocab-size", "100"), "model.vocab_size is 100.* has 259 ids"),
    (("--training.batch-size", "99999"), "batch_size 99999 is larger"),
    (("--data.dataset", "no/such/place"), "no/such/place"),
    (("--mesh.data", "64"), "needs 64 devices; there are 1"),
    (
      ("--model.attention", "splash", "--data.sequence-length", "128"),
      "attention 'splash' cannot serve: it runs on tpu, the platform is cpu",
    ),
  ],
)
def test_data_and_machines_that_do_not_fit(corpus, tmp_path, options, message):
  done = run(
    *("configs/quickstart.py", "--workdir", tmp_path / "run"),
    *override("--data.dataset", corpus, *TINY, *options),
  )
  assert done.returncode == 2, done.stderr
  assert re.search(message, done.stderr), done.stderr
  assert "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


def test_help_lists_every_field():
  done = run("configs/quickstart.py", "--help")
  assert done.returncode == 0
  for option in (
    "--workdir",
    "--model.routing.variant",
    "--model.routing.key-dim",
    "--optimizer.query-multiplier",
    "--training.stop-after",
    "--data.sequence-length",
  ):
    assert option in done.stdout
