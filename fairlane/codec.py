"""Avro codec in the Confluent wire format: ``0x00``, a 4-byte big-endian schema id, the body.

A record is written with the newest schema of its type. It is read with the schema that its id names, and resolved to
the newest. Of a repeated map key the last entry counts.
"""

import io
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

from fastavro import parse_schema, schemaless_reader, schemaless_writer

from fairlane.avro_validation import RecordScan, ScanError, ScanFault
from fairlane.record_bounds import max_items, max_record_bytes
from fairlane.records import MOST_INPUT_ITEMS, type_by_name
from fairlane.schema_safety import SchemaRefusedError, check_schema

MAGIC_BYTE = 0
_FRAME = struct.Struct(">bI")
_UNSCANNED_BYTES = MOST_INPUT_ITEMS
"""Records up to this size are decoded without a scan, which would cost more than it could save: a list item takes at
least one byte (``check_schema`` ensures that), so they hold no more items than a request may have."""

_FIELD_IN_MESSAGE = re.compile(r"on field (\w+)$")

RecordT = TypeVar("RecordT")
OtherT = TypeVar("OtherT")
ThirdT = TypeVar("ThirdT")
_Convert = Callable[[Any], Any]


class DecodeProblem(StrEnum):
    """Why bytes do not decode; also a metric label."""

    EMPTY = "empty"
    BAD_MAGIC = "bad_magic"
    UNKNOWN_SCHEMA_ID = "unknown_schema_id"
    TRUNCATED_BODY = "truncated_body"
    TRAILING_BYTES = "trailing_bytes"
    TOO_LARGE = "too_large"
    TOO_MANY_ITEMS = "too_many_items"
    INVALID_BODY = "invalid_body"
    UNEXPECTED_TYPE = "unexpected_type"
    INTAKE_FAILED = "intake_failed"
    BAD_HEADER = "bad_header"
    BAD_BATCH = "bad_batch"
    BAD_CRC = "bad_crc"
    BAD_COMPRESSION = "bad_compression"
    INFLATES_TOO_FAR = "inflates_too_far"
    UNKNOWN_MAGIC = "unknown_magic"


class DecodeError(ValueError):
    """The bytes are not a valid record. The message never contains the bytes.

    Attributes:
        problem: kind of the error.
        reason: the error in words; without record type and field if ``field`` is set.
        field: path to the faulty field; empty if unknown.
        record_type: type of a record that the codec refused for its size; None for other problems.
        leading: string fields at the beginning of such a record, by name, as far as they can be decoded.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        detail: str,
        *,
        field: str = "",
        reason: str = "",
        record_type: type | None = None,
        leading: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem = problem
        self.field = field
        self.reason = reason or detail
        self.record_type = record_type
        self.leading: Mapping[str, str] = leading or {}


class SchemaNotLoadedError(LookupError):
    """The schema of this id is not loaded, and the caller did not allow a registry request."""

    def __init__(self, schema_id: int) -> None:
        super().__init__(f"schema id {schema_id}")
        self.schema_id = schema_id


class SchemaSource(Protocol):
    """Source of schemas and their ids: the committed files or a schema registry."""

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        """Id and schema for writing a record of this name. Raises KeyError for an unknown name."""

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        """Record name and schema of an id. Raises KeyError for an unknown id, RegistryError for an unavailable
        registry."""

    def is_loaded(self, schema_id: int) -> bool:
        """Whether ``reader`` knows this id without a registry request."""

    def refresh(self) -> None:
        """Load schemas registered since the last call. Blocks for registry requests. Raises RegistryError."""


@dataclass(frozen=True, slots=True)
class _Reader:
    record_type: type
    writer_schema: Any
    reader_schema: Any
    from_plain: _Convert
    scan: RecordScan
    max_bytes: int


class Codec:
    """Encodes and decodes the records of :mod:`fairlane.records`. Safe to share between threads."""

    def __init__(self, source: SchemaSource) -> None:
        self._source = source
        self._writers: dict[type, tuple[bytes, Any, _Convert]] = {}
        self._rest_writers: dict[type, tuple[bytes, Any, _Convert]] = {}
        self._readers: dict[int, _Reader] = {}

    def encode(self, record: object) -> bytes:
        """Encode a record. Raises TypeError for a type without a schema, ValueError for an invalid value."""
        prepared = self._writers.get(type(record))
        if prepared is None:
            prepared = self._prepare_writer(type(record))
        header, schema, to_plain = prepared
        return _written(record, header, schema, to_plain)

    def body_if_current(self, record_type: type, data: bytes) -> bytes | None:
        """The body of a message written with the current schema of this type; None for any other message."""
        header = (self._writers.get(record_type) or self._prepare_writer(record_type))[0]
        return data[len(header) :] if data.startswith(header) else None

    def encode_around(self, record: object, first_body: bytes) -> bytes:
        """Like ``encode``, for a record whose first field was decoded from ``first_body`` and is unchanged (see
        ``body_if_current``). Avro writes fields one after another, so these bytes are reused."""
        prepared = self._rest_writers.get(type(record))
        if prepared is None:
            prepared = self._prepare_rest_writer(type(record))
        header, schema, to_plain = prepared
        return _written(record, header + first_body, schema, to_plain)

    def decode(self, data: bytes | None) -> object:
        """Decode a record. Raises DecodeError for invalid bytes, RegistryError if the registry with the schema is
        unavailable."""
        return _decoded(data or b"", self._reader(data))

    def decode_as(self, record_type: type[RecordT], data: bytes | None) -> RecordT:
        """Like ``decode``; a record of another type raises DecodeError."""
        return self.decode_any((record_type,), data)

    @overload
    def decode_any(
        self, record_types: tuple[type[RecordT]], data: bytes | None, *, may_ask: bool = True
    ) -> RecordT: ...
    @overload
    def decode_any(
        self, record_types: tuple[type[RecordT], type[OtherT]], data: bytes | None, *, may_ask: bool = True
    ) -> RecordT | OtherT: ...
    @overload
    def decode_any(
        self,
        record_types: tuple[type[RecordT], type[OtherT], type[ThirdT]],
        data: bytes | None,
        *,
        may_ask: bool = True,
    ) -> RecordT | OtherT | ThirdT: ...
    @overload
    def decode_any(
        self, record_types: tuple[type[RecordT], ...], data: bytes | None, *, may_ask: bool = True
    ) -> RecordT: ...
    def decode_any(self, record_types: tuple[type, ...], data: bytes | None, *, may_ask: bool = True) -> object:
        """Like ``decode``, for records of these types. A record of another type is not decoded.

        ``may_ask`` allows registry requests, which block.

        Raises:
            DecodeError: the bytes are invalid, or a record of another type.
            SchemaNotLoadedError: the schema is not loaded, and ``may_ask`` is False.
            RegistryError: the registry is unavailable.
        """
        reader = self._reader(data, may_ask=may_ask)
        if reader.record_type not in record_types:
            expected = " or ".join(record_type.__name__ for record_type in record_types)
            raise DecodeError(DecodeProblem.UNEXPECTED_TYPE, f"{reader.record_type.__name__}, expected {expected}")
        return _decoded(data or b"", reader)

    def is_loaded(self, data: bytes | None) -> bool:
        """Whether ``decode`` of these bytes makes no registry request."""
        if not data or data[0] != MAGIC_BYTE or len(data) < _FRAME.size:
            return True
        schema_id = _FRAME.unpack_from(data)[1]
        return schema_id in self._readers or self._source.is_loaded(schema_id)

    def refresh(self) -> None:
        """See ``SchemaSource.refresh``."""
        self._source.refresh()

    def _reader(self, data: bytes | None, *, may_ask: bool = True) -> _Reader:
        """The reader for the schema id of these bytes. Raises DecodeError, SchemaNotLoadedError or RegistryError."""
        if not data:
            raise DecodeError(DecodeProblem.EMPTY, "no bytes")
        if data[0] != MAGIC_BYTE:
            raise DecodeError(DecodeProblem.BAD_MAGIC, f"first byte is {data[0]:#04x}, expected 0x00")
        if len(data) < _FRAME.size:
            raise DecodeError(DecodeProblem.TRUNCATED_BODY, f"{len(data)} bytes, the frame alone takes {_FRAME.size}")
        schema_id = _FRAME.unpack_from(data)[1]
        prepared = self._readers.get(schema_id)
        if prepared is not None:
            return prepared
        if not may_ask and not self._source.is_loaded(schema_id):
            raise SchemaNotLoadedError(schema_id)
        return self._prepare_reader(schema_id)

    def _prepare_writer(self, record_type: type) -> tuple[bytes, Any, _Convert]:
        if type_by_name.get(record_type.__name__) is not record_type:
            raise TypeError(f"{record_type.__name__} has no schema")
        schema_id, schema = self._source.writer(record_type.__name__)
        to_plain = _record_converter(record_type, to_plain=True)
        prepared = (_FRAME.pack(MAGIC_BYTE, schema_id), parse_schema(dict(schema)), to_plain)
        self._writers[record_type] = prepared
        return prepared

    def _prepare_rest_writer(self, record_type: type) -> tuple[bytes, Any, _Convert]:
        """Prepare the writer of all fields but the first."""
        schema_id, schema = self._source.writer(record_type.__name__)
        first, *others = schema["fields"]
        # A named type is defined at its first use, which may be in the omitted field.
        named: dict[str, Any] = {}
        parse_schema(first["type"], named_schemas=named)
        rest = parse_schema({**schema, "fields": others}, named_schemas=named)
        prepared = (_FRAME.pack(MAGIC_BYTE, schema_id), rest, _record_converter(record_type, to_plain=True, skip=1))
        self._rest_writers[record_type] = prepared
        return prepared

    def _prepare_reader(self, schema_id: int) -> _Reader:
        try:
            name, writer_schema = self._source.reader(schema_id)
            record_type = type_by_name[name]
            check_schema(writer_schema)
        except KeyError:
            raise DecodeError(DecodeProblem.UNKNOWN_SCHEMA_ID, f"schema id {schema_id}") from None
        except SchemaRefusedError as error:
            raise DecodeError(DecodeProblem.UNKNOWN_SCHEMA_ID, f"schema id {schema_id} is refused: {error}") from None
        _, reader_schema = self._source.writer(name)
        same = writer_schema == reader_schema
        prepared = self._readers[schema_id] = _Reader(
            record_type,
            parse_schema(dict(writer_schema)),
            None if same else parse_schema(dict(reader_schema)),
            _record_converter(record_type, to_plain=False),
            RecordScan(writer_schema, max_items),
            max_record_bytes(name),
        )
        return prepared


def _decoded(data: bytes, reader: _Reader) -> object:
    if len(data) > _UNSCANNED_BYTES:
        _check_size(data, reader)
    body = io.BytesIO(data)
    body.seek(_FRAME.size)
    try:
        plain = schemaless_reader(body, reader.writer_schema, reader.reader_schema)
    except Exception as error:  # noqa: BLE001 - fastavro raises many types on hostile bytes; all mean the same here
        raise _undecodable(data, reader, error) from None
    if body.tell() != len(data):
        extra = len(data) - body.tell()
        raise DecodeError(DecodeProblem.TRAILING_BYTES, f"{extra} bytes after {reader.record_type.__name__}")
    return reader.from_plain(plain)


def _check_size(data: bytes, reader: _Reader) -> None:
    """Check size and item counts before any object is built. Raises DecodeError."""
    if len(data) > reader.max_bytes:
        raise _too_large(
            DecodeProblem.TOO_LARGE, "", f"{len(data)} bytes are more than {reader.max_bytes}", data, reader
        )
    try:
        reader.scan.check(data, _FRAME.size)
    except ScanError as error:
        raise _of_scan(error, data, reader) from None


def _undecodable(data: bytes, reader: _Reader, error: Exception) -> DecodeError:
    """The error for bytes that fastavro refuses. A scan finds the faulty field, which fastavro does not name."""
    found = reader.scan.explain(data, _FRAME.size)
    if found is not None:
        return _of_scan(found, data, reader)
    name = reader.record_type.__name__
    if isinstance(error, EOFError):
        return DecodeError(DecodeProblem.TRUNCATED_BODY, f"{name} ends early")
    return DecodeError(DecodeProblem.INVALID_BODY, f"{name}: {type(error).__name__}")


def _of_scan(error: ScanError, data: bytes, reader: _Reader) -> DecodeError:
    if error.fault is ScanFault.TOO_MANY_ITEMS:
        return _too_large(DecodeProblem.TOO_MANY_ITEMS, error.field, error.reason, data, reader)
    ends_early = error.fault is ScanFault.ENDS_EARLY
    problem = DecodeProblem.TRUNCATED_BODY if ends_early else DecodeProblem.INVALID_BODY
    detail = f"{reader.record_type.__name__}.{error.field}: {error.reason}"
    return DecodeError(problem, detail, field=error.field, reason=error.reason)


def _too_large(problem: DecodeProblem, field: str, reason: str, data: bytes, reader: _Reader) -> DecodeError:
    name = reader.record_type.__name__
    return DecodeError(
        problem,
        f"{name}.{field}: {reason}" if field else f"{name}: {reason}",
        field=field,
        reason=reason,
        record_type=reader.record_type,
        leading=reader.scan.leading_strings(data, _FRAME.size),
    )


def _written(record: object, prefix: bytes, schema: Any, to_plain: _Convert) -> bytes:
    body = io.BytesIO()
    body.write(prefix)
    try:
        # Without the flag fastavro takes a pair in an optional field for its (branch, value) notation.
        schemaless_writer(body, schema, to_plain(record), disable_tuple_notation=True)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # fastavro's message quotes the value, which may be a prompt: take only the field name from it.
        named = _FIELD_IN_MESSAGE.findall(str(error))
        where = f"{type(record).__name__}.{named[-1]}" if named else type(record).__name__
        raise ValueError(f"{where}: a value that its schema does not allow ({type(error).__name__})") from None
    return body.getvalue()


def _converter(annotation: Any, *, to_plain: bool) -> _Convert | None:
    """Converter between a value of this type and what fastavro writes and reads; None if no conversion is needed."""
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = [argument for argument in get_args(annotation) if argument is not type(None)]
        present = _converter(inner, to_plain=to_plain)
        return None if present is None else lambda value: None if value is None else present(value)
    if get_origin(annotation) is tuple:
        convert = _converter(get_args(annotation)[0], to_plain=to_plain)
        if convert is None:
            return None if to_plain else tuple
        if to_plain:
            return lambda values: [convert(value) for value in values]
        return lambda values: tuple([convert(value) for value in values])
    if is_dataclass(annotation):
        return _record_converter(cast("type", annotation), to_plain=to_plain)
    return None


def _record_converter(record_type: type, *, to_plain: bool, skip: int = 0) -> _Convert:
    # One generated expression per type: this is the dispatcher's hottest code, and a loop over fields takes twice as
    # long.
    hints = get_type_hints(record_type)
    scope: dict[str, Any] = {"make": record_type}
    parts = []
    for entry in fields(record_type)[skip:]:
        convert = _converter(hints[entry.name], to_plain=to_plain)
        value = f"given.{entry.name}" if to_plain else f"given[{entry.name!r}]"
        if convert is not None:
            scope[f"convert_{entry.name}"] = convert
            value = f"convert_{entry.name}({value})"
        parts.append(f"{entry.name!r}: {value}" if to_plain else value)
    made = f"{{{', '.join(parts)}}}" if to_plain else f"make({', '.join(parts)})"
    return cast("_Convert", eval(f"lambda given: {made}", scope))  # noqa: S307 - our own field names
