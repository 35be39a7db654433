"""Records of files, one at a time: parquet, JSON lines, texts, TFDS sets.

A reader yields, for every record, its text, or what is `Bad` about it. Memory
is that of a few records, however large the file is. Needs pyarrow (extra
`data`) for parquet and zstd, which is imported when such a file is read.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import gzip
import io
import json
import os
from typing import Any, BinaryIO
import zlib

from deltajax.data import storage
from deltajax.extras import install
from deltajax.routing.validation import check_name, ConfigError, unknown_name

_CHUNK = 2**20
_RECORDS_AT_ONCE = 256
_BYTES_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """How records become documents.

  Attributes:
    column: what holds the text, in records that hold more.
    invalid_utf8: `stop` at a document that is not UTF-8, or `replace` what is
      not by U+FFFD and count the document.
    bad_records: `stop` at a record that gives no document (a broken line, no
      text, too long), or `skip` and count it.
    max_document_bytes: of a document, or of its whole line in JSON. A tokenizer
      needs some hundred times that in memory.
  """

  column: str = "text"
  invalid_utf8: str = "stop"
  bad_records: str = "stop"
  max_document_bytes: int = 2**26

  def __post_init__(self) -> None:
    check_name("invalid_utf8", self.invalid_utf8, ("stop", "replace"))
    check_name("bad_records", self.bad_records, ("stop", "skip"))
    if self.max_document_bytes < 1:
      raise ConfigError(
        f"max_document_bytes is {self.max_document_bytes}; it must be positive."
      )


@dataclasses.dataclass(frozen=True)
class Bad:
  """A record that gives no document.

  Attributes:
    reason: for counting: `broken`, `no_text` or `too_long`.
    message: where it is, and what is wrong.
  """

  reason: str
  message: str


@dataclasses.dataclass
class Tally:
  """What became of records.

  Attributes:
    replaced: documents in which bytes were replaced.
    skipped: records that gave no document, by reason.
  """

  replaced: int = 0
  skipped: dict[str, int] = dataclasses.field(default_factory=dict)


def documents(
  records: Iterable[str | Bad], reading: Reading, tally: Tally
) -> Iterator[str]:
  """Yields the documents of records; raises ConfigError at a bad one, or skips.

  Args:
    records: of one of the readers below.
    reading: says which.
    tally: is added to.
  """
  for record in records:
    if isinstance(record, str):
      yield record
    elif reading.bad_records == "stop":
      raise ConfigError(
        f"{record.message} (bad_records 'skip' would count it and go on)"
      )
    else:
      tally.skipped[record.reason] = tally.skipped.get(record.reason, 0) + 1


def open_parquet(path: str, column: str) -> Any:
  """Opens a parquet file whose column can be read as text.

  Raises:
    ConfigError: it is no parquet file, or has no such column; names those that
      there are.
  """
  pyarrow = _pyarrow(path)
  try:
    # Read as needed: a row group may be larger than memory.
    file = pyarrow.parquet.ParquetFile(
      path,
      pre_buffer=False,
      buffer_size=_CHUNK,
      page_checksum_verification=True,
    )
  except (OSError, pyarrow.ArrowException) as error:
    raise ConfigError(f"{path} cannot be read as parquet: {error}") from None
  schema = file.schema_arrow
  if column not in schema.names:
    raise ConfigError(f"{path}: {unknown_name('column', column, schema.names)}")
  kind = schema.field(column).type
  if pyarrow.types.is_dictionary(kind):
    kind = kind.value_type
  if str(kind).removeprefix("large_") not in ("string", "binary"):
    raise ConfigError(f"{path}: column {column!r} holds {kind}, not text.")
  return file


def parquet(path: str, reading: Reading, tally: Tally) -> Iterator[str | Bad]:
  """Yields the rows of a parquet file."""
  pyarrow = _pyarrow(path)
  number = 0
  with open_parquet(path, reading.column) as file:
    try:
      for batch in _batches(file, reading.column):
        column = batch.column(0)
        if pyarrow.types.is_dictionary(column.type):
          column = column.dictionary_decode()
        for raw in column.cast(pyarrow.large_binary()):
          number += 1
          where = f"{path}, row {number}"
          if raw.is_valid:
            yield _document(where, raw.as_py(), reading, tally)
          else:
            yield Bad("no_text", f"{where}: {reading.column!r} is null.")
    except (OSError, pyarrow.ArrowException) as error:
      raise ConfigError(
        f"{path} cannot be read behind row {number}: {error}"
      ) from None


def _batches(file: Any, name: str) -> Iterator[Any]:
  """Yields a column, as many rows at once as hold some `_BYTES_AT_ONCE`."""
  for number in range(file.num_row_groups):
    group = file.metadata.row_group(number)
    columns = map(group.column, range(group.num_columns))
    size = sum(
      x.total_uncompressed_size for x in columns if x.path_in_schema == name
    )
    rows = group.num_rows * _BYTES_AT_ONCE // max(size, 1)
    yield from file.iter_batches(
      min(max(rows, 1), _RECORDS_AT_ONCE),
      row_groups=[number],
      columns=[name],
      use_threads=False,
    )


def jsonl(path: str, reading: Reading, tally: Tally) -> Iterator[str | Bad]:
  """Yields the lines of a file, which may be compressed, without blank ones."""
  number = 0
  try:
    with _open(path) as file:
      for line in _lines(file, reading.max_document_bytes):
        number += 1
        where = f"{path}:{number}"
        if line is None:
          yield _too_long(where, "the line has", reading)
        elif line.strip():
          yield _json_text(where, line, reading, tally)
  except (OSError, EOFError, zlib.error) as error:
    raise ConfigError(
      f"{path} cannot be read behind line {number}: {error}"
    ) from None


def texts(
  paths: Iterable[str], reading: Reading, tally: Tally
) -> Iterator[str | Bad]:
  """Yields whole files."""
  for path in paths:
    size = os.path.getsize(path)
    if size > reading.max_document_bytes:
      yield _too_long(path, f"the file has {size} bytes,", reading)
    else:
      with open(path, "rb") as file:
        yield _document(path, file.read(), reading, tally)


def tfds(
  directory: str,
  split: str,
  begin: int,
  end: int,
  reading: Reading,
  tally: Tally,
) -> Iterator[str | Bad]:
  """Yields the records [begin, end) of a split of a TFDS directory."""
  builder = storage.open_dataset(directory)
  source = storage.records(builder, f"{split}[{begin}:{end}]")
  for k in range(end - begin):
    where = f"{directory}, record {begin + k} of {split!r}"
    text = source[k][reading.column]
    if isinstance(text, str):
      text = text.encode()
    if isinstance(text, bytes):
      yield _document(where, text, reading, tally)
    else:
      found = type(text).__name__
      yield Bad(
        "no_text", f"{where}: {reading.column!r} is {found}, no string."
      )


def _document(
  where: str, raw: bytes, reading: Reading, tally: Tally
) -> str | Bad:
  """The text of a document that is stored as bytes."""
  if len(raw) > reading.max_document_bytes:
    return _too_long(where, f"the document has {len(raw)} bytes,", reading)
  return _decode(where, raw, reading, tally)


def _too_long(where: str, found: str, reading: Reading) -> Bad:
  return Bad(
    "too_long",
    f"{where}: {found} more than max_document_bytes"
    f" {reading.max_document_bytes}.",
  )


def _decode(where: str, raw: bytes, reading: Reading, tally: Tally) -> str:
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as error:
    if reading.invalid_utf8 == "stop":
      raise ConfigError(
        f"{where}: not UTF-8, byte 0x{raw[error.start]:02x} at {error.start}"
        " (invalid_utf8 'replace' would put U+FFFD there and go on)"
      ) from None
    tally.replaced += 1
    return raw.decode("utf-8", errors="replace")


def _json_text(
  where: str, line: bytes, reading: Reading, tally: Tally
) -> str | Bad:
  """The text in a line of JSON."""
  own = Tally()  # Of a document that is replaced twice, or comes to nothing.
  decoded = _decode(where, line.removeprefix(b"\xef\xbb\xbf"), reading, own)
  try:
    value = json.loads(decoded)
  except (ValueError, RecursionError) as error:
    return Bad("broken", f"{where}: no JSON: {error}.")
  if not isinstance(value, dict):
    return Bad("broken", f"{where}: no JSON object: {decoded[:40]!r}.")
  if reading.column not in value:
    message = unknown_name("column", reading.column, value)
    return Bad("no_text", f"{where}: {message}")
  text = value[reading.column]
  if not isinstance(text, str):
    found = json.dumps(text)[:40]
    return Bad("no_text", f"{where}: {reading.column!r} is {found}, no string.")
  # JSON can spell halves of characters, which no UTF-8 can.
  raw = text.encode("utf-8", errors="surrogatepass")
  text = _decode(where, raw, reading, own)
  tally.replaced += bool(own.replaced)
  return text


def _lines(file: BinaryIO, limit: int) -> Iterator[bytes | None]:
  """The lines of a file; None for one of more bytes than `limit`."""
  while line := file.readline(limit + 1):
    if len(line) <= limit or line.endswith(b"\n"):
      yield line
      continue
    while (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
      pass
    yield None


def _open(path: str) -> BinaryIO:
  if path.endswith(".gz"):
    return gzip.open(path)  # type: ignore[return-value]
  if path.endswith(".zst"):
    pyarrow = _pyarrow(path)
    return io.BufferedReader(
      pyarrow.CompressedInputStream(path, "zstd"), _CHUNK
    )
  return open(path, "rb", buffering=_CHUNK)


def _pyarrow(path: str) -> Any:
  try:
    import pyarrow.parquet
  except ModuleNotFoundError:
    raise ConfigError(f"{path} needs pyarrow: {install('data')}.") from None
  return pyarrow
