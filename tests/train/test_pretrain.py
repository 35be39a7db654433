"""The command as a user runs it."""

import functools
import re

from tests.helpers import run_module

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
    " after 6 updates",
    "\nsample:\ndef ",
    "layer 1 mlp",
    f"checkpoints  {tmp_path / 'run' / 'checkpoints'}",
  ):
    assert part in done.stdout, (part, done.stdout)
  before, _, after = done.stdout.partition("step 2/6 ")
  assert len(before.splitlines()) < 24  # One screen.
  assert re.match(r" loss [\d.]+  [\d.,k]+ tok/s  \d\S* left\n", after)
  again = run(*arguments)
  assert "resumed after 6 of 6 updates" in again.stdout
  other = run(*arguments, "--training.seed", "5")
  assert other.returncode == 2
  assert "training.seed: 0 in the run, 5 now" in other.stderr
  assert "Traceback" not in other.stderr
