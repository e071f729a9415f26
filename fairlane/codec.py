"""Avro in Confluent wire framing: ``0x00``, a 4-byte big-endian schema id, the body.

A record is written with the newest schema of its type and read with whatever schema its id names, resolved
to the newest.
"""

import io
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

from fastavro import parse_schema, schemaless_reader, schemaless_writer

from fairlane.records import type_by_name

MAGIC_BYTE = 0
_FRAME = struct.Struct(">bI")
_FIELD_IN_MESSAGE = re.compile(r"on field (\w+)$")

RecordT = TypeVar("RecordT")
OtherT = TypeVar("OtherT")
_Convert = Callable[[Any], Any]


class DecodeProblem(StrEnum):
    """What is wrong with bytes that do not decode."""

    EMPTY = "empty"
    BAD_MAGIC = "bad_magic"
    UNKNOWN_SCHEMA_ID = "unknown_schema_id"
    TRUNCATED_BODY = "truncated_body"
    TRAILING_BYTES = "trailing_bytes"
    INVALID_BODY = "invalid_body"
    UNEXPECTED_TYPE = "unexpected_type"
    INTAKE_FAILED = "intake_failed"
    TOO_LARGE = "too_large"
    BAD_HEADER = "bad_header"
    BAD_BATCH = "bad_batch"
    BAD_CRC = "bad_crc"
    BAD_COMPRESSION = "bad_compression"
    INFLATES_TOO_FAR = "inflates_too_far"
    UNKNOWN_MAGIC = "unknown_magic"


class DecodeError(ValueError):
    """These bytes are no record; ``problem`` says why. The message never contains the bytes."""

    def __init__(self, problem: DecodeProblem, detail: str) -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem = problem


class SchemaSource(Protocol):
    """Where schemas and their ids come from: the committed files or a schema registry."""

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        """The id and schema that a record of this name is written with. Raises KeyError for an unknown name."""

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        """The record name and schema that an id stands for. Raises KeyError for an unknown id."""


class Codec:
    """Encodes and decodes the records of :mod:`fairlane.records`. Safe to share between threads."""

    def __init__(self, source: SchemaSource) -> None:
        self._source = source
        self._writers: dict[type, tuple[bytes, Any, _Convert]] = {}
        self._rest_writers: dict[type, tuple[bytes, Any, _Convert]] = {}
        self._readers: dict[int, tuple[type, Any, Any, _Convert]] = {}

    def encode(self, record: object) -> bytes:
        """The record in wire framing. Raises TypeError for a type without a schema, ValueError for a bad value."""
        prepared = self._writers.get(type(record))
        if prepared is None:
            prepared = self._prepare_writer(type(record))
        header, schema, to_plain = prepared
        return _written(record, header, schema, to_plain)

    def body_if_current(self, record_type: type, data: bytes) -> bytes | None:
        """The body of a message, if it was written with the schema that records of this type are written with now."""
        header = (self._writers.get(record_type) or self._prepare_writer(record_type))[0]
        return data[len(header) :] if data.startswith(header) else None

    def encode_around(self, record: object, first_body: bytes) -> bytes:
        """As ``encode``, of a record whose first field was read from ``first_body`` and is unchanged (see
        ``body_if_current``): Avro writes a record's fields one after another, so the bytes are taken as they are."""
        prepared = self._rest_writers.get(type(record))
        if prepared is None:
            prepared = self._prepare_rest_writer(type(record))
        header, schema, to_plain = prepared
        return _written(record, header + first_body, schema, to_plain)

    def decode(self, data: bytes | None) -> object:
        """The record these bytes hold. Raises DecodeError, and nothing else, for bytes that hold none."""
        if not data:
            raise DecodeError(DecodeProblem.EMPTY, "no bytes")
        if data[0] != MAGIC_BYTE:
            raise DecodeError(DecodeProblem.BAD_MAGIC, f"first byte is {data[0]:#04x}, expected 0x00")
        if len(data) < _FRAME.size:
            raise DecodeError(DecodeProblem.TRUNCATED_BODY, f"{len(data)} bytes, the frame alone takes {_FRAME.size}")
        schema_id = _FRAME.unpack_from(data)[1]
        prepared = self._readers.get(schema_id)
        if prepared is None:
            prepared = self._prepare_reader(schema_id)
        record_type, writer_schema, reader_schema, from_plain = prepared
        body = io.BytesIO(data)
        body.seek(_FRAME.size)
        try:
            plain = schemaless_reader(body, writer_schema, reader_schema)
        except Exception as error:  # noqa: BLE001 - fastavro raises many types on hostile bytes; all mean the same here
            # fastavro says IndexError when the bytes end inside a number, whose last byte there asks for another.
            ends_in_number = isinstance(error, IndexError) and body.tell() == len(data) and data[-1] >= 0x80
            if isinstance(error, EOFError) or ends_in_number:
                raise DecodeError(DecodeProblem.TRUNCATED_BODY, f"{record_type.__name__} ends early") from None
            name = type(error).__name__
            raise DecodeError(DecodeProblem.INVALID_BODY, f"{record_type.__name__}: {name}") from None
        if body.tell() != len(data):
            extra = len(data) - body.tell()
            raise DecodeError(DecodeProblem.TRAILING_BYTES, f"{extra} bytes after {record_type.__name__}")
        return from_plain(plain)

    def decode_as(self, record_type: type[RecordT], data: bytes | None) -> RecordT:
        """Like ``decode``, and DecodeError when the bytes hold another type of record."""
        return self.decode_any((record_type,), data)

    @overload
    def decode_any(self, record_types: tuple[type[RecordT]], data: bytes | None) -> RecordT: ...
    @overload
    def decode_any(self, record_types: tuple[type[RecordT], type[OtherT]], data: bytes | None) -> RecordT | OtherT: ...
    def decode_any(self, record_types: tuple[type, ...], data: bytes | None) -> object:
        """Like ``decode``, and DecodeError when the bytes hold a record of none of these types."""
        record = self.decode(data)
        if not isinstance(record, record_types):
            expected = " or ".join(record_type.__name__ for record_type in record_types)
            raise DecodeError(DecodeProblem.UNEXPECTED_TYPE, f"{type(record).__name__}, expected {expected}")
        return record

    def _prepare_writer(self, record_type: type) -> tuple[bytes, Any, _Convert]:
        if type_by_name.get(record_type.__name__) is not record_type:
            raise TypeError(f"{record_type.__name__} has no schema")
        schema_id, schema = self._source.writer(record_type.__name__)
        to_plain = _to_plain(record_type) or _identity
        prepared = (_FRAME.pack(MAGIC_BYTE, schema_id), parse_schema(dict(schema)), to_plain)
        self._writers[record_type] = prepared
        return prepared

    def _prepare_rest_writer(self, record_type: type) -> tuple[bytes, Any, _Convert]:
        """Of all fields but the first."""
        schema_id, schema = self._source.writer(record_type.__name__)
        first, *others = schema["fields"]
        # A type is defined where it stands first, which may be in the field that is left out.
        named: dict[str, Any] = {}
        parse_schema(first["type"], named_schemas=named)
        rest = parse_schema({**schema, "fields": others}, named_schemas=named)
        prepared = (_FRAME.pack(MAGIC_BYTE, schema_id), rest, _record_to_plain(record_type, skip=1))
        self._rest_writers[record_type] = prepared
        return prepared

    def _prepare_reader(self, schema_id: int) -> tuple[type, Any, Any, _Convert]:
        try:
            name, writer_schema = self._source.reader(schema_id)
            record_type = type_by_name[name]
        except KeyError:
            raise DecodeError(DecodeProblem.UNKNOWN_SCHEMA_ID, f"schema id {schema_id}") from None
        _, reader_schema = self._source.writer(name)
        same = writer_schema == reader_schema
        from_plain = _from_plain(record_type) or _identity
        prepared = (
            record_type,
            parse_schema(dict(writer_schema)),
            None if same else parse_schema(dict(reader_schema)),
            from_plain,
        )
        self._readers[schema_id] = prepared
        return prepared


def _written(record: object, prefix: bytes, schema: Any, to_plain: _Convert) -> bytes:
    body = io.BytesIO()
    body.write(prefix)
    try:
        # Without the flag a pair inside an optional field is taken for fastavro's (branch, value).
        schemaless_writer(body, schema, to_plain(record), disable_tuple_notation=True)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # fastavro's message quotes the value, which may be a prompt: only the name of the field is taken from it.
        named = _FIELD_IN_MESSAGE.findall(str(error))
        where = f"{type(record).__name__}.{named[-1]}" if named else type(record).__name__
        raise ValueError(f"{where}: a value that its schema does not allow ({type(error).__name__})") from None
    return body.getvalue()


def _identity(value: Any) -> Any:
    return value


def _inner_of_optional(annotation: Any) -> Any | None:
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = [argument for argument in get_args(annotation) if argument is not type(None)]
        return inner
    return None


def _optional(convert: _Convert | None) -> _Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _to_plain(annotation: Any) -> _Convert | None:
    """A function from a value of this type to what fastavro writes; None when the value is written as it is."""
    inner = _inner_of_optional(annotation)
    if inner is not None:
        return _optional(_to_plain(inner))
    if get_origin(annotation) is tuple:
        convert = _to_plain(get_args(annotation)[0])
        return None if convert is None else lambda values: [convert(value) for value in values]
    if is_dataclass(annotation):
        return _record_to_plain(cast("type", annotation))
    return None


def _record_to_plain(record_type: type, skip: int = 0) -> _Convert:
    # One generated expression per type: the dispatcher's hottest code, and a loop over fields costs double.
    hints = get_type_hints(record_type)
    scope: dict[str, Any] = {}
    parts = []
    for entry in fields(record_type)[skip:]:
        convert = _to_plain(hints[entry.name])
        value = f"record.{entry.name}"
        if convert is not None:
            scope[f"convert_{entry.name}"] = convert
            value = f"convert_{entry.name}({value})"
        parts.append(f"{entry.name!r}: {value}")
    return cast("_Convert", eval(f"lambda record: {{{', '.join(parts)}}}", scope))  # noqa: S307 - our own field names


def _from_plain(annotation: Any) -> _Convert | None:
    inner = _inner_of_optional(annotation)
    if inner is not None:
        return _optional(_from_plain(inner))
    if get_origin(annotation) is tuple:
        convert = _from_plain(get_args(annotation)[0])
        return tuple if convert is None else lambda values: tuple([convert(value) for value in values])
    if is_dataclass(annotation):
        return _record_from_plain(cast("type", annotation))
    return None


def _record_from_plain(record_type: type) -> _Convert:
    hints = get_type_hints(record_type)
    scope: dict[str, Any] = {"make": record_type}
    parts = []
    for entry in fields(record_type):
        convert = _from_plain(hints[entry.name])
        value = f"plain[{entry.name!r}]"
        if convert is not None:
            scope[f"convert_{entry.name}"] = convert
            value = f"convert_{entry.name}({value})"
        parts.append(value)
    return cast("_Convert", eval(f"lambda plain: make({', '.join(parts)})", scope))  # noqa: S307 - our own field names
