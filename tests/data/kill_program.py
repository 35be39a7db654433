"""Kills preparation before each thing that it does to the disk, and resumes.

    python kill_program.py SOURCES WORK

Prints how often it was killed. Forks, so that everything is imported once.
"""

import os
import pathlib
import random
import signal
import sys

from deltajax.data import encoding, packing, prepare, prepare_tasks, workers
from deltajax.data.split_plan import Fractions

encoding._BYTES_AT_ONCE = 2000
packing.TOKENS_PER_SHARD = 4000
prepare_tasks._TOKENS_BETWEEN_TICKS = 500

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile")


def build(sources, out, kill_at=None):
  """Returns the number of events; kills this process before one of them."""
  events = 0

  def happens():
    nonlocal events
    if events == kill_at:
      os.kill(os.getpid(), signal.SIGKILL)
    events += 1

  def hook(event, arguments):
    written = event == "open" and set(str(arguments[1])) & set("wax")
    if (event in CHANGES or written) and str(out) in str(arguments):
      happens()

  class Tick(workers._Tick):
    def __call__(self, *done):
      happens()
      super().__call__(*done)

  workers._Tick = Tick
  sys.addaudithook(hook)
  corpus = prepare.Corpus(
    sources=(sources,),
    tokenizer="bytes",
    sequence_length=16,
    fractions=Fractions(validation=0.1, test=0.1),
  )
  prepare.prepare(corpus, out, workers=0, log=lambda line: None)
  return events


def in_child(function, *args):
  """Returns how the child ended; what it returns is limited to 2**16 - 1."""
  reader, writer = os.pipe()
  pid = os.fork()
  if not pid:
    os.write(writer, function(*args).to_bytes(2, "little"))
    os._exit(0)
  os.close(writer)
  _, status = os.waitpid(pid, 0)
  with os.fdopen(reader, "rb") as file:
    return os.waitstatus_to_exitcode(status), file.read()


def content(directory):
  files = sorted(path for path in directory.rglob("*") if path.is_file())
  return {path.relative_to(directory): path.read_bytes() for path in files}


def main(sources, work):
  work = pathlib.Path(work)
  code, count = in_child(build, sources, work / "undisturbed")
  assert code == 0
  count = int.from_bytes(count, "little")
  wanted = content(work / "undisturbed")
  assert len([name for name in wanted if "train" in str(name)]) > 3
  rng = random.Random(0)
  killed = 0
  moments = sorted({*rng.sample(range(count), 14), *range(count - 8, count)})
  for moment in moments:
    out = work / f"killed{moment}"
    code, _ = in_child(build, sources, out, moment)
    assert code == -signal.SIGKILL, (moment, code)
    killed += 1
    # Once more, a little further on: what a resumed run does is resumed too.
    code, _ = in_child(build, sources, out, 12)
    killed += code == -signal.SIGKILL
    code, _ = in_child(build, sources, out)
    assert code == 0, moment
    assert content(out) == wanted, moment
  left = {path.name for path in work.iterdir()}
  assert left == {"undisturbed", *(f"killed{moment}" for moment in moments)}
  print(killed)


if __name__ == "__main__":
  main(*sys.argv[1:])
