"""Scalars as TensorBoard reads them: records of a file of events.

tensorboardX writes such files from a thread of its own, which ends where the
disk is full; what is given to it after that waits for ever. So only its
messages and its checksum are used here.
"""

from collections.abc import Mapping
import os
import pathlib
import socket
import struct
import time
from typing import Any


def new_file(directory: pathlib.Path) -> pathlib.Path:
  """A name for the events of one session."""
  place = f"{socket.gethostname()}.{os.getpid()}"
  return directory / f"events.out.tfevents.{time.time():.6f}.{place}"


def session_start(step: int) -> bytes:
  """What a file begins with; events from `step` on that were there are void.

  Args:
    step: the first update of the session.
  """
  from tensorboardX.proto.event_pb2 import SessionLog

  start = SessionLog(status=SessionLog.START)
  return _record(file_version="brain.Event:2") + _record(
    step=step, session_log=start
  )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
  """The values of one update.

  Args:
    step: completed updates.
    values: by name.
  """
  from tensorboardX.proto.summary_pb2 import Summary

  found = [Summary.Value(tag=k, simple_value=x) for k, x in values.items()]
  return _record(step=step, summary=Summary(value=found))


def _record(**fields: Any) -> bytes:
  """An event as a TFRecord: length, its checksum, the event, its checksum."""
  # Heavy, and of use only here.
  from tensorboardX.proto.event_pb2 import Event
  from tensorboardX.record_writer import masked_crc32c

  event = Event(wall_time=time.time(), **fields).SerializeToString()
  length = struct.pack("<Q", len(event))
  return b"".join(
    [
      *(length, struct.pack("<I", masked_crc32c(length))),
      *(event, struct.pack("<I", masked_crc32c(event))),
    ]
  )
