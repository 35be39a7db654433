"""Checkpoints that cannot be written or read, one kind of fault at a time."""

import contextlib
import pathlib
import resource
import shutil
import sys
import threading
import time
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from deltajax.checkpoints import manager, reading
from deltajax.checkpoints.checksums import ChecksumError, checksums
from deltajax.checkpoints.manager import Checkpoints, Keep
from deltajax.checkpoints.reading import (
  complete_steps,
  read_params,
  read_state,
)
from deltajax.config import ConfigError
from deltajax.training import saving
from deltajax.training.health import Health
from deltajax.training.saving import restore_newest, Saver
from deltajax.training.step import TrainState
from deltajax.training.stopping import NotSavedError


def state(value):
  x = np.random.default_rng(value).standard_normal((64, 64), np.float32)
  return {"x": jnp.asarray(x), "step": jnp.int32(value)}


@pytest.fixture
def saved(tmp_path):
  """Checkpoints of steps 1 to 3."""
  with Checkpoints(tmp_path / "checkpoints", Keep(3)) as saved:
    for step in (1, 2, 3):
      saved.save(step, state(step), {"at": step}, {"config": step})
    saved.wait()
    yield saved


def files_of(tmp_path, step):
  root = tmp_path / "checkpoints" / str(step)
  return [path for path in sorted(root.rglob("*")) if path.is_file()]


def largest(tmp_path, step):
  return max(files_of(tmp_path, step), key=lambda path: path.stat().st_size)


def flip_a_bit(tmp_path, step):
  # The data of the larger array, past the file's header.
  path = largest(tmp_path, step)
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 4
  path.write_bytes(raw)


def cut_short(tmp_path, step):
  path = largest(tmp_path, step)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete_array_files(tmp_path, step):
  largest(tmp_path, step).unlink()


def delete_position(tmp_path, step):
  shutil.rmtree(tmp_path / "checkpoints" / str(step) / "data")


def garble_position(tmp_path, step):
  for path in files_of(tmp_path, step):
    if path.parent.name == "data":
      path.write_text("{")


def other_position(tmp_path, step):
  replace_in(tmp_path, step, "data", '"at": 3', '"at": 7')


def other_config(tmp_path, step):
  replace_in(tmp_path, step, "config", ": 3", ": 4")


def replace_in(tmp_path, step, item, old, new):
  """Still JSON, but not what was written."""
  changed = 0
  for path in files_of(tmp_path, step):
    if path.parent.name == item and old in (text := path.read_text()):
      path.write_text(text.replace(old, new))
      changed += 1
  assert changed == 1


def empty_all(tmp_path, step):
  for path in files_of(tmp_path, step):
    path.write_bytes(b"")


FAULTS = (
  flip_a_bit,
  cut_short,
  delete_array_files,
  delete_position,
  garble_position,
  other_position,
  other_config,
  empty_all,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_read(
  saved, tmp_path, fault
):
  fault(tmp_path, 3)
  saved.reload()
  lines = []
  found = restore_newest(saved, lambda k: saved.read(k, state(0)), lines.append)
  assert found.step == found.data["at"] == 2
  np.testing.assert_array_equal(found.state["x"], state(2)["x"])
  assert lines[0].startswith("WARNING   checkpoint 3 is damaged (")
  assert str(tmp_path / "damaged") in lines[1]
  assert (tmp_path / "damaged" / "3").is_dir()
  assert saved.steps() == [2, 1]
  # Its number is free again.
  saved.save(3, state(3), {"at": 3}, {})
  saved.wait()
  assert saved.read(3, state(0)).checked().data == {"at": 3}


def test_nothing_that_can_be_read_is_said_and_left_alone(saved, tmp_path):
  for step in (1, 2, 3):
    cut_short(tmp_path, step)
  saved.reload()
  lines = []
  with pytest.raises(ConfigError, match=r"none of the checkpoints \[3, 2, 1\]"):
    restore_newest(saved, lambda k: saved.read(k, state(0)), lines.append)
  assert len(lines) == 3
  assert saved.steps() == [3, 2, 1]


def test_another_config_is_no_damage(saved):
  def refuse(step):
    raise ConfigError(f"{step} is another run's")

  with pytest.raises(ConfigError, match="3 is another run's"):
    restore_newest(saved, refuse, print)


def test_parameters_alone_are_checked_too(tmp_path, monkeypatch):
  params = {"a": state(1)["x"], "b": {"c": state(2)["x"]}}
  whole = TrainState(jnp.int32(1), params, {}, Health.new())
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  wrong = checksums(whole) | {".params['b']['c']": 5}
  with Checkpoints(tmp_path / "checkpoints", Keep(2)) as saved:
    saved.save(1, whole, {}, {})
    monkeypatch.setattr(manager, "checksums", lambda tree: wrong)
    saved.save(2, whole, {}, {})
  monkeypatch.undo()
  place = tmp_path / "checkpoints"
  chex.assert_trees_all_equal(
    read_params(place, 1, like, "float32").checked().state, params
  )
  with pytest.raises(ChecksumError, match=r"the first is \['b'\]\['c'\]"):
    read_params(place, 2, like, "float32").checked()


def test_all_hosts_are_told_of_a_refusal_before_it_is_raised(
  saved, monkeypatch
):
  told = []

  def agree(facts, error=None):
    told.append(error)
    if error is not None:
      raise error

  monkeypatch.setattr(saving.hosts, "agree", agree)

  def refuse(step):
    raise ConfigError(f"{step} is another run's")

  with pytest.raises(ConfigError, match="3 is another run's") as error:
    restore_newest(saved, refuse, print)
  assert told == [error.value]


@pytest.mark.parametrize("host", range(2))
def test_damage_that_one_host_sees_ends_no_other(saved, monkeypatch, host):
  """Arrays are compared, on all hosts together, once all have read them."""
  calls = []

  def any_host(mine):
    calls.append("any_host")
    return (
      mine or calls.count("any_host") == 1
    )  # Checkpoint 3, here or on the other host.

  def read(step):
    calls.append("read")
    if host and step == 3:
      raise OSError("cut short")
    return saved.read(step, state(0))

  def check(tree, expected):
    calls.append("check")

  monkeypatch.setattr(saving.hosts, "any_host", any_host)
  monkeypatch.setattr(reading, "check", check)
  lines = []
  calls.clear()
  found = restore_newest(saved, read, lines.append)
  assert found.step == 2
  (line,) = (x for x in lines if x.startswith("WARNING"))
  assert ("cut short" if host else "on another host") in line
  assert calls == ["read", "any_host", "read", "any_host", "check"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: x | {"more": x["x"]}, r"checkpoint 3 has no \['more'\]"),
    (lambda x: {"x": x["x"]}, r"checkpoint 3 has another array, \['step'\]"),
  ],
)
def test_a_state_of_other_arrays_is_no_damage(saved, change, message):
  lines = []
  with pytest.raises(ConfigError, match=message):
    restore_newest(
      saved, lambda k: saved.read(k, change(state(0))), lines.append
    )
  assert not lines
  assert saved.steps() == [3, 2, 1]


def test_reading_waits_for_no_other_host(saved, tmp_path, monkeypatch):
  """Nor does a directory that is opened."""
  waits = mock.Mock(side_effect=AssertionError("waits"))
  barrier = ocp.multihost.sync_global_processes
  monkeypatch.setattr(sys.modules[barrier.__module__], barrier.__name__, waits)
  place = tmp_path / "checkpoints"
  assert read_state(place, 3, state(0)).found.step == 3
  with Checkpoints(place, Keep(3)):
    pass
  waits.assert_not_called()


def test_no_checkpoint_is_none(tmp_path):
  with Checkpoints(tmp_path / "checkpoints") as saved:
    assert restore_newest(saved, lambda k: saved.read(k, {}), print) is None


@pytest.mark.parametrize(
  ("keep", "expected"),
  [
    (Keep(2), [6, 5]),
    (Keep(1, every=2), [6, 4, 2]),
    (Keep(1, best=1), [6, 3]),
    (Keep(1, best=2), [6, 4, 3]),
  ],
)
def test_which_are_kept(tmp_path, keep, expected):
  losses = {1: 9.0, 2: None, 3: 1.0, 4: 2.0, 5: 3.0, 6: None}
  with Checkpoints(tmp_path / "checkpoints", keep) as saved:
    for step, loss in losses.items():
      saved.save(step, state(step), {}, {}, loss)
    saved.wait()
    assert saved.steps() == expected
  assert complete_steps(tmp_path / "checkpoints") == expected


def test_the_best_is_kept_over_sessions(tmp_path):
  place = tmp_path / "checkpoints"

  def session(losses, number=1):
    with Checkpoints(place, Keep(1, best=number)) as saved:
      for step, loss in losses.items():
        saved.save(step, state(step), {}, {}, loss)
      saved.wait()
      return saved.steps()

  assert session({1: 9.0, 2: 1.0, 3: 5.0}) == [3, 2]
  assert session({4: 6.0, 5: 7.0}) == [5, 2]
  assert session({6: 0.5, 7: 8.0}) == [7, 6]
  garble_position(tmp_path, 6)  # Those behind it know its loss.
  assert session({8: 3.0, 9: 4.0}) == [9, 6]
  # Where nobody does, it may be the best.
  garble_position(tmp_path, 9)
  assert session({10: 3.0, 11: 4.0}) == [11, 10, 9, 6]


def test_a_loss_that_is_known_later_counts_for_ever(tmp_path):
  def session(losses, noted=None):
    with Checkpoints(tmp_path / "checkpoints", Keep(1, best=1)) as saved:
      if noted is not None:
        saved.note_loss(*noted)
      for step, loss in losses.items():
        saved.save(step, state(step), {}, {}, loss)
      saved.wait()
      return saved.steps()

  assert session({1: 9.0, 2: None}) == [2, 1]
  assert session({3: 5.0}, noted=(2, 1.0)) == [3, 2]
  assert session({4: 6.0, 5: 7.0}) == [5, 2]


def test_what_was_written_after_all_is_no_failure(saved):
  saver = Saver(saved, every=10, log=lambda line: None)
  saver._failed = True
  saver.finish(3, state(3), {}, {})
  assert not saver.due(11)


def test_the_best_is_kept_over_a_failure(tmp_path):
  with Checkpoints(tmp_path / "checkpoints", Keep(1, best=1)) as saved:
    for step, loss in {1: 9.0, 2: 1.0, 3: 5.0}.items():
      saved.save(step, state(step), {}, {}, loss)
    saved.wait()
    saved.start_again()
    for step in (4, 5):
      saved.save(step, state(step), {}, {}, 7.0)
    saved.wait()
    assert saved.steps() == [5, 2]


class Broken:
  """Checkpoints whose writing fails as long as `reason` is set."""

  def __init__(self, saved, monkeypatch):
    self.reason = None
    save = saved.save

    def write(*args, **kwargs):
      if self.reason is not None:
        raise self.reason
      save(*args, **kwargs)

    monkeypatch.setattr(saved, "save", write)


def test_a_failure_is_loud_and_tried_again_soon(saved, monkeypatch):
  disk, lines = Broken(saved, monkeypatch), []
  saver = Saver(saved, every=20, log=lines.append)
  assert [k for k in range(1, 41) if saver.due(k)] == [20, 40]
  disk.reason = OSError(28, "No space left on device")
  saver.save(20, state(20), {}, {})
  assert "No space left on device" in lines[0]
  assert "the last good checkpoint has 3 updates" in lines[0]
  assert "tried again within 2 updates" in lines[0]
  assert [k for k in range(21, 31) if saver.due(k)] == [22, 24, 26, 28, 30]
  disk.reason = None
  saver.save(22, state(22), {}, {})
  saved.wait()
  assert saved.steps()[0] == 22
  assert not saver.due(24)


def test_the_last_checkpoint_holds_up_the_run_until_it_is_complete(
  saved, monkeypatch
):
  wait = saved.wait

  def slow():
    time.sleep(0.2)
    wait()

  saver = Saver(saved, every=20, log=lambda line: None)
  saver.finish(4, state(4), {}, {})
  monkeypatch.setattr(saved, "wait", slow)
  saver.finish(5, state(5), {}, {})
  assert saver.blocked_seconds > 0.4  # For the one before, and for itself.


def test_the_end_of_a_run_that_cannot_be_saved(saved, monkeypatch):
  monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
  disk = Broken(saved, monkeypatch)
  disk.reason = OSError(30, "Read-only file system")
  saver = Saver(saved, every=20, log=lambda line: None)
  with pytest.raises(NotSavedError, match="the last good checkpoint has 3"):
    saver.finish(25, state(25), {}, {})


def test_a_directory_that_cannot_be_opened_again_ends_nothing(
  saved, monkeypatch
):
  lines = []
  saver = Saver(saved, every=10, log=lines.append)
  disk = Broken(saved, monkeypatch)
  disk.reason = OSError(30, "Read-only file system")
  with monkeypatch.context() as patch:
    refused = mock.Mock(side_effect=disk.reason)
    patch.setattr(ocp, "CheckpointManager", refused)
    saver.save(10, state(10), {}, {})
    assert refused.called
    # What a manager that is closed believes counts for nothing.
    patch.setattr(saved._manager, "all_steps", lambda: [3, 10])
    assert saved.steps() == [3, 2, 1]
  assert "the last good checkpoint has 3 updates" in lines[0]
  disk.reason = None
  assert saver.due(11)
  saver.save(11, state(11), {}, {})
  saved.wait()
  assert saved.steps()[0] == 11
  assert len(lines) == 1


def test_where_no_checkpoint_can_be_begun_none_is(saved, tmp_path, monkeypatch):
  """Threads of Orbax would wait for it, and keep the process from ending."""
  lines = []
  saver = Saver(saved, every=10, log=lines.append)
  before = threading.active_count()
  with monkeypatch.context() as patch:
    refused = mock.Mock(side_effect=OSError(30, "Read-only file system"))
    patch.setattr(pathlib.Path, "mkdir", refused)
    saver.save(10, state(10), {}, {})
  assert "Read-only file system" in lines[0]
  assert threading.active_count() <= before
  (tmp_path / "checkpoints" / ".probe").mkdir()  # Left by a process' death.
  saver.finish(11, state(11), {}, {})
  assert saved.steps()[0] == 11
  names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert ".probe" not in names


@contextlib.contextmanager
def small_files_only():
  """The operating system refuses files of more than 4 kB, as a full disk."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_while_it_is_written(saved, tmp_path):
  lines = []
  saver = Saver(saved, every=10, log=lines.append)
  with small_files_only():
    saver.save(10, state(10), {}, {})
    while saved.is_writing():
      time.sleep(0.01)
  assert saver.due(11)
  assert "could not be written" in lines[0], lines
  assert "the last good checkpoint has 3 updates" in lines[0]
  saver.finish(11, state(11), {}, {})
  assert saved.steps() == [11, 3, 2]
  names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert names == {"11", "3", "2"}
  np.testing.assert_array_equal(
    saved.read(11, state(0)).checked().state["x"], state(11)["x"]
  )
