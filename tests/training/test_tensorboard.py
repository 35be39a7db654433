import struct

import pytest

from deltajax.training import tensorboard
from deltajax.training.appended_file import AppendedFile


def events(data):
  """As TensorBoard reads them."""
  from tensorboardX.proto.event_pb2 import Event
  from tensorboardX.record_writer import masked_crc32c

  while data:
    (length,) = struct.unpack("<Q", data[:8])
    event = data[12 : 12 + length]
    for part, crc in ((data[:8], data[8:12]), (event, data[12 + length :][:4])):
      assert struct.pack("<I", masked_crc32c(part)) == crc
    yield Event.FromString(event)
    data = data[16 + length :]


def test_scalars_are_read_back():
  data = tensorboard.session_start(6)
  data += tensorboard.scalars(6, {"loss": 1.5, "rate": 0.25})
  version, start, found = events(data)
  assert version.file_version == "brain.Event:2"
  assert (start.step, start.session_log.status) == (6, start.session_log.START)
  assert found.step == 6
  values = {x.tag: x.simple_value for x in found.summary.value}
  assert values == {"loss": 1.5, "rate": 0.25}


def test_the_file_is_what_tensorboardx_writes(tmp_path):
  tensorboardx = pytest.importorskip("tensorboardX")
  with tensorboardx.SummaryWriter(str(tmp_path), purge_step=6) as writer:
    writer.add_scalar("loss", 1.5, 6)
  (path,) = tmp_path.iterdir()
  theirs = list(events(path.read_bytes()))
  ours = list(
    events(tensorboard.session_start(6) + tensorboard.scalars(6, {"loss": 1.5}))
  )
  for event in (*theirs, *ours):
    event.wall_time = 0
    for value in event.summary.value:
      value.ClearField("metadata")
  # It says the version twice, the second time with the step.
  assert theirs[0] == ours[0]
  assert theirs[2:] == ours[1:]


class Full:
  """A disk with room for some bytes."""

  def __init__(self, room):
    self.room, self.taken = room, b""

  def write(self, data):
    if data and not self.room:
      raise OSError(28, "No space left on device")
    taken = data[: self.room]
    self.taken, self.room = self.taken + taken, self.room - len(taken)
    return len(taken)

  def close(self):
    pass


def test_what_a_disk_does_not_take_is_kept(tmp_path):
  file = AppendedFile(tmp_path / "lines")
  disk = file._file = Full(4)
  with pytest.raises(OSError, match="No space"):
    file.write(b"first\n")
  with pytest.raises(OSError, match="No space"):
    file.write(b"second\n")
  assert disk.taken == b"firs"
  disk.room = 100
  file.write(b"third\n")
  assert disk.taken == b"first\nsecond\nthird\n"
  disk.room = 0
  with pytest.raises(OSError, match="No space"):
    file.write(b"fourth\n")
  assert file.close() == len(b"fourth\n")
