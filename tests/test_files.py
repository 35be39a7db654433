"""Files that one process has at a time."""

import threading

from deltajax.files import one_at_a_time, try_lock


def test_who_waited_keeps_out_who_comes_later(tmp_path):
  """The file of the lock goes with the first, and others must not mind."""
  lock = tmp_path / "lock"
  waiting, inside, leave = (threading.Event() for _ in range(3))

  def second():
    with one_at_a_time(lock, waiting.set):
      inside.set()
      leave.wait(60)

  thread = threading.Thread(target=second)
  with one_at_a_time(lock, lambda: None):
    thread.start()
    assert waiting.wait(60)
    assert not inside.is_set()
  assert inside.wait(60)
  with lock.open("a") as file:
    assert not try_lock(file)
  leave.set()
  thread.join(60)
  assert not lock.exists()
  with one_at_a_time(lock, waiting.clear):
    assert waiting.is_set()  # Nobody to wait for.
