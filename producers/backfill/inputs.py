"""Rows of JSONL, CSV and Parquet from any position on, in the memory of a few blocks."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any

from producers.backfill.errors import InputChangedError, NoSuchInputError
from producers.backfill.files import BLOCK_BYTES, Blob
from producers.backfill.job import BadRow, FileFormat, Fingerprint, InputPosition, JobSpec, RowContent
from producers.backfill.rows import FIELD_NAMES

_BOM = b"\xef\xbb\xbf"
_HEADER_BYTES = 64 * 1024
_BATCH_ROWS = 1_000
_NEWLINE = b"\n"
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class Piece:
    """A line of text or a CSV record, without its newline. ``content`` is None if it is too long; ``end`` is the offset
    behind its newline."""

    content: bytes | None
    size_bytes: int
    end: int


@dataclass(slots=True)
class LineSplitter:
    """Splits at newlines; with ``quoted`` not at those between double quotes (RFC 4180).

    A record that is too long ends at the next newline, quoted or not: an unbalanced quote costs one record, not the
    rest of the file.
    """

    max_bytes: int
    position: int = 0
    quoted: bool = False
    _parts: list[bytes] = field(default_factory=list, init=False)
    _held: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)
    _in_quotes: bool = field(default=False, init=False)

    def feed(self, block: bytes) -> Iterator[Piece]:
        """The records that end in this block."""
        begin = 0
        while (at := block.find(_NEWLINE, begin)) >= 0:
            self._hold(block[begin:at])
            begin = at + 1
            if self._in_quotes and not self._skipped:
                self._hold(_NEWLINE)
                continue
            yield self._ended(1)
        self._hold(block[begin:])

    def last(self) -> Piece | None:
        """The text after the last newline, if any. Nothing follows it."""
        return self._ended(0) if self._held or self._skipped else None

    def _hold(self, part: bytes) -> None:
        if not part:
            return
        if self.quoted and not self._skipped and part.count(_QUOTE) % 2:
            self._in_quotes = not self._in_quotes
        if self._skipped or self._held + len(part) > self.max_bytes:
            self._skipped += self._held + len(part)
            self._held = 0
            self._parts.clear()
            return
        self._held += len(part)
        self._parts.append(part)

    def _ended(self, newline_bytes: int) -> Piece:
        size = self._held + self._skipped
        self.position += size + newline_bytes
        content = None if self._skipped else b"".join(self._parts)
        self._parts.clear()
        self._held = self._skipped = 0
        self._in_quotes = False
        return Piece(content, size, self.position)


class RowSource(ABC):
    """The rows of the input. Nothing is opened before the first read: a job with nothing left to read ends although its
    input is gone."""

    def __init__(self, blob: Blob, fingerprint: Fingerprint, spec: JobSpec) -> None:
        self._blob = blob
        self._fingerprint = fingerprint
        self._spec = spec
        self._rows: Iterator[tuple[RowContent, int, InputPosition]] = iter(())
        self._at: InputPosition | None = None

    def read(self, begin: InputPosition, most_rows: int, most_bytes: int) -> tuple[list[RowContent], InputPosition]:
        """Rows from a position on, at least one if there are any, and the position behind them. Repeatable.

        Raises UnavailableError, InputChangedError and NoSuchInputError.
        """
        self._check_unchanged()
        if self._at != begin:
            self._rows = self._rows_from(begin)
        self._at = None
        rows: list[RowContent] = []
        held, end = 0, begin
        for content, size, row_end in islice(self._rows, most_rows):
            rows.append(content)
            end = row_end
            held += size
            if held >= most_bytes:
                break
        self._at = end
        return rows, end

    def close(self) -> None:  # noqa: B027 - lines have nothing open between two reads
        """Close what is open between two reads."""

    @abstractmethod
    def _check_unchanged(self) -> None:
        """Called for every chunk. Raises InputChangedError."""

    @abstractmethod
    def _rows_from(self, begin: InputPosition) -> Iterator[tuple[RowContent, int, InputPosition]]:
        """Content and size of each row, and the position behind it. Raises NoSuchInputError."""


class LineSource(RowSource):
    """JSONL or CSV."""

    def __init__(self, blob: Blob, fingerprint: Fingerprint, spec: JobSpec) -> None:
        super().__init__(blob, fingerprint, spec)
        self._is_csv = spec.input_format is FileFormat.CSV
        self._header: tuple[list[str | None], int] | None = None

    def _check_unchanged(self) -> None:
        self._blob.read(0, 1, self._fingerprint)

    def _rows_from(self, begin: InputPosition) -> Iterator[tuple[RowContent, int, InputPosition]]:
        columns: list[str | None] = []
        offset = begin.offset
        if self._is_csv:
            columns, first = self._columns()
            offset = max(offset, first)
        for piece in self._pieces(offset):
            content, end = piece.content, InputPosition(0, piece.end)
            if content is None:
                wrong = BadRow(None, "row", f"{piece.size_bytes} bytes are more than {self._spec.max_row_bytes}")
                yield wrong, 0, end
            elif content.strip():
                yield _csv_row(content, columns) if self._is_csv else content, piece.size_bytes, end

    def _columns(self) -> tuple[list[str | None], int]:
        """The request field of each column, None for an unused one, and the offset of the first row."""
        if self._header is None:
            splitter = LineSplitter(_HEADER_BYTES, quoted=True)
            piece = next(self._split(splitter, 0), None)
            names = [] if piece is None or piece.content is None else _cells(piece.content.removeprefix(_BOM))
            if piece is None or not isinstance(names, list):
                raise NoSuchInputError(f"{self._spec.input}: the first line is no header of CSV")
            self._header = fields_of_columns(names, self._spec), piece.end
        return self._header

    def _pieces(self, offset: int) -> Iterator[Piece]:
        splitter = LineSplitter(self._spec.max_row_bytes, offset, quoted=self._is_csv)
        for piece in self._split(splitter, offset):
            if piece.content is not None and piece.content.startswith(_BOM) and piece.end <= piece.size_bytes + 1:
                yield Piece(piece.content.removeprefix(_BOM), piece.size_bytes, piece.end)
            else:
                yield piece

    def _split(self, splitter: LineSplitter, offset: int) -> Iterator[Piece]:
        while block := self._blob.read(offset, BLOCK_BYTES, self._fingerprint):
            offset += len(block)
            yield from splitter.feed(block)
        last = splitter.last()
        if last is not None:
            yield last


class ParquetSource(RowSource):
    """Parquet, by row groups."""

    def __init__(self, blob: Blob, fingerprint: Fingerprint, spec: JobSpec) -> None:
        super().__init__(blob, fingerprint, spec)
        self._handle: IO[bytes] | None = None
        self._file: Any = None
        self._fields: dict[str, str] = {}

    def close(self) -> None:
        if self._file is not None:
            self._file.close(force=True)
        if self._handle is not None:
            self._handle.close()

    def _open(self) -> None:
        """Raises NoSuchInputError for a file that is not Parquet, or lacks a named column."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with ExitStack() as opened:
            handle = opened.enter_context(self._blob.open())
            try:
                file = pq.ParquetFile(handle, buffer_size=BLOCK_BYTES)
            except (pa.ArrowException, OSError):
                raise NoSuchInputError(f"{self._spec.input}: cannot be read as Parquet") from None
            names = file.schema_arrow.names
            taken = zip(names, fields_of_columns(names, self._spec), strict=True)
            self._fields = {name: field for name, field in taken if field is not None}
            self._handle, self._file = handle, file
            opened.pop_all()

    def _check_unchanged(self) -> None:
        if self._blob.fingerprint() != self._fingerprint:
            raise InputChangedError(f"{self._spec.input} has changed since the job was submitted")

    def _rows_from(self, begin: InputPosition) -> Iterator[tuple[RowContent, int, InputPosition]]:
        import pyarrow as pa

        if self._file is None:
            self._open()
        most_bytes = self._spec.max_row_bytes
        try:
            for content, end in self._positions_from(begin):
                size = _size_of(content)
                too_large = BadRow(None, "row", f"{size} bytes are more than {most_bytes}")
                yield content if size <= most_bytes else too_large, size, end
        except (pa.ArrowException, OSError) as error:
            raise NoSuchInputError(f"{self._spec.input}: cannot be read on ({type(error).__name__})") from None

    def _positions_from(self, begin: InputPosition) -> Iterator[tuple[RowContent, InputPosition]]:
        batch_rows = min(self._spec.chunk_rows, _BATCH_ROWS)
        for group in range(begin.group, self._file.num_row_groups):
            skip = begin.offset if group == begin.group else 0
            passed = 0
            for batch in self._file.iter_batches(batch_rows, [group], columns=list(self._fields)):
                first = max(skip, passed)
                if first < passed + batch.num_rows:
                    for number, content in enumerate(self._contents(batch.slice(first - passed)), first + 1):
                        yield content, InputPosition(group, number)
                passed += batch.num_rows

    def _contents(self, batch: Any) -> Iterator[RowContent]:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError) as error:
            # One invalid value, such as text that is not UTF-8, fails the whole batch: convert row by row.
            if batch.num_rows == 1:
                yield BadRow(None, "row", f"cannot be read: {type(error).__name__}")
            else:
                for number in range(batch.num_rows):
                    yield from self._contents(batch.slice(number, 1))
            return
        for row in rows:
            yield {self._fields[name]: value for name, value in row.items()}


def fields_of_columns(names: list[str], spec: JobSpec) -> list[str | None]:
    """The request field of each column, None for an unused one. Raises NoSuchInputError for a missing column."""
    missing = spec.columns.keys() - set(names)
    if missing:
        raise NoSuchInputError(f"{spec.input}: there is no column {min(missing)!r}")
    if spec.columns:
        return [spec.columns.get(name) for name in names]
    return [name if name in FIELD_NAMES else None for name in names]


def source_of(blob: Blob, fingerprint: Fingerprint, spec: JobSpec) -> RowSource:
    """The rows of an input."""
    made = ParquetSource if spec.input_format is FileFormat.PARQUET else LineSource
    return made(blob, fingerprint, spec)


def _csv_row(content: bytes, columns: list[str | None]) -> RowContent:
    cells = _cells(content)
    if isinstance(cells, BadRow):
        return cells
    if len(cells) != len(columns):
        return BadRow(None, "row", f"{len(cells)} cells; the header has {len(columns)}")
    # An empty cell is an unset field: CSV has no other way to express it.
    return {name: cell for name, cell in zip(columns, cells, strict=True) if name is not None and cell}


def _cells(content: bytes) -> "list[str] | BadRow":
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(None, "row", f"not UTF-8: byte {error.start} of the row")
    try:
        return next(csv.reader([text.rstrip("\r")], strict=True))
    except (csv.Error, StopIteration) as error:
        return BadRow(None, "row", f"not CSV: {error}")


def _size_of(value: object) -> int:
    """Approximate size of a Parquet value, in bytes."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    return sum(map(_size_of, value)) if isinstance(value, (list, tuple)) else 8
