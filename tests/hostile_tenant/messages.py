"""Kafka's requests and answers in every version, as bytes, by the definitions that Kafka's own jar carries.

So every request of the broker under test can be sent, also those that no client library for Python has. Source of the
encoding: KIP-482 and Kafka's protocol guide. Tagged fields are written where they are given, and skipped when read.
"""

import json
import re
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from aiokafka.protocol.api import RequestHeader_v1, RequestHeader_v2, ResponseHeader_v0, ResponseHeader_v1

_COMMENTS = re.compile(r"^\s*//.*$", re.MULTILINE)
_RANGE = re.compile(r"(\d+)(?:(\+)|-(\d+))?")
_LAST_VERSION = 32_767
_NUMBERS = {
    "bool": struct.Struct(">?"),
    "int8": struct.Struct(">b"),
    "int16": struct.Struct(">h"),
    "uint16": struct.Struct(">H"),
    "int32": struct.Struct(">i"),
    "uint32": struct.Struct(">I"),
    "int64": struct.Struct(">q"),
    "float64": struct.Struct(">d"),
}
_UUID_BYTES = 16

Definition = Mapping[str, Any]
Values = Mapping[str, Any]
"""Fields by the names of the definitions; those that are missing have their defaults. An id of a topic is a UUID."""


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of versions, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str | None) -> "Versions":
        """As the definitions have it: ``3``, ``0-12``, ``4+`` or ``none``."""
        found = _RANGE.fullmatch(text or "none")
        if found is None:
            return cls(0, -1)
        first = int(found[1])
        return cls(first, _LAST_VERSION if found[2] else int(found[3] or first))

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last

    def common(self, other: "Versions") -> "Versions":
        """What both have."""
        return Versions(max(self.first, other.first), min(self.last, other.last))


Encode = Callable[[Any, bytearray], None]
Decode = Callable[[BytesIO], Any]


@dataclass(frozen=True, slots=True)
class _Codec:
    """How a type is written and read."""

    encode: Encode
    decode: Decode


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One request or answer in all its versions."""

    name: str
    key: int
    versions: Versions
    _flexible: Versions
    _fields: tuple[Definition, ...]
    _structs: Mapping[str, tuple[Definition, ...]]
    _codecs: dict[int, _Codec] = field(default_factory=dict)

    @classmethod
    def from_definition(cls, definition: Definition) -> "Message":
        """Of the content of one file."""
        structs = {struct["name"]: tuple(struct["fields"]) for struct in definition.get("commonStructs", ())}
        # Requests that are no longer any have none.
        fields = tuple(definition.get("fields", ()))
        for given in (fields, *structs.copy().values()):
            structs.update(_inline_structs(given))
        return cls(
            definition["name"],
            definition.get("apiKey", -1),
            Versions.parse(definition["validVersions"]),
            Versions.parse(definition.get("flexibleVersions")),
            fields,
            structs,
        )

    def is_flexible(self, version: int) -> bool:
        return version in self._flexible

    def encode(self, version: int, values: Values) -> bytes:
        """Raises KeyError for a value that no version has a field for."""
        written = bytearray()
        self._codec(version).encode(values, written)
        return bytes(written)

    def decode(self, version: int, answer: bytes | BytesIO) -> dict[str, Any]:
        """Fields that the version does not have are missing."""
        found: dict[str, Any] = self._codec(version).decode(BytesIO(answer) if isinstance(answer, bytes) else answer)
        return found

    def _codec(self, version: int) -> _Codec:
        if version not in self._codecs:
            self._codecs[version] = self._struct(self._fields, version)
        return self._codecs[version]

    def _struct(self, definitions: tuple[Definition, ...], version: int) -> _Codec:
        flexible = version in self._flexible
        known = {one["name"] for one in definitions}
        plain: list[tuple[str, _Codec, Any]] = []
        tagged: list[tuple[str, _Codec, int]] = []
        for one in definitions:
            if version not in Versions.parse(one["versions"]):
                continue
            codec = self._type(one["type"], one, version)
            if version in Versions.parse(one.get("taggedVersions")):
                tagged.append((one["name"], codec, one["tag"]))
            else:
                plain.append((one["name"], codec, _default(one)))

        def encode(values: Values, into: bytearray) -> None:
            if not known.issuperset(values):
                raise KeyError(f"{self.name}: no field {', '.join(sorted({*values} - known))}")
            for name, codec, default in plain:
                codec.encode(values.get(name, default), into)
            if flexible:
                given = sorted((tag, codec, values[name]) for name, codec, tag in tagged if name in values)
                _write_length(len(given), into)
                for tag, codec, value in given:
                    content = bytearray()
                    codec.encode(value, content)
                    _write_length(tag, into)
                    _write_length(len(content), into)
                    into += content

        def decode(data: BytesIO) -> dict[str, Any]:
            found = {name: codec.decode(data) for name, codec, _ in plain}
            if flexible:
                for _ in range(_read_length(data)):
                    _read_length(data)
                    data.read(_read_length(data))
            return found

        return _Codec(encode, decode)

    def _type(self, name: str, definition: Definition, version: int) -> _Codec:
        flexible = version in self._flexible
        if name.startswith("[]"):
            return _array(self._type(name[2:], {}, version), flexible=flexible)
        if (number := _NUMBERS.get(name)) is not None:
            return _number(number)
        if name == "uuid":
            return _Codec(_encode_uuid, lambda data: uuid.UUID(bytes=data.read(_UUID_BYTES)))
        if name == "string":
            return _sized(struct.Struct(">h"), str.encode, bytes.decode, flexible=flexible)
        if name in {"bytes", "records"}:
            return _sized(struct.Struct(">i"), bytes, bytes, flexible=flexible)
        one = self._struct(self._structs[name], version)
        return _nullable(one) if version in Versions.parse(definition.get("nullableVersions")) else one


def _inline_structs(definitions: tuple[Definition, ...] | list[Definition]) -> Iterator[tuple[str, Any]]:
    for one in definitions:
        if "fields" in one:
            yield one["type"].removeprefix("[]"), tuple(one["fields"])
            yield from _inline_structs(one["fields"])


def _default(definition: Definition) -> Any:
    name, default = definition["type"], definition.get("default")
    if default == "null":
        return None
    if name.startswith("[]"):
        return ()
    if name == "bool":
        return str(default).lower() == "true"
    if name == "float64":
        return float(default or 0)
    if name in _NUMBERS:
        return int(str(default or 0), 0)
    others: dict[str, Any] = {"string": default or "", "bytes": b"", "records": None, "uuid": uuid.UUID(int=0)}
    return others.get(name, {})


def _number(number: struct.Struct) -> _Codec:
    def encode(value: float, into: bytearray) -> None:
        into += number.pack(value)

    def decode(data: BytesIO) -> Any:
        return number.unpack(data.read(number.size))[0]

    return _Codec(encode, decode)


def _encode_uuid(value: uuid.UUID, into: bytearray) -> None:
    into += value.bytes


def _sized(
    head: struct.Struct, to_bytes: Callable[[Any], bytes], of_bytes: Callable[[bytes], Any], *, flexible: bool
) -> _Codec:
    def encode(value: Any, into: bytearray) -> None:
        content = None if value is None else to_bytes(value)
        if flexible:
            _write_length(0 if content is None else len(content) + 1, into)
        else:
            into += head.pack(-1 if content is None else len(content))
        into += content or b""

    def decode(data: BytesIO) -> Any:
        size = _read_length(data) - 1 if flexible else head.unpack(data.read(head.size))[0]
        return None if size < 0 else of_bytes(data.read(size))

    return _Codec(encode, decode)


def _array(item: _Codec, *, flexible: bool) -> _Codec:
    head = _NUMBERS["int32"]

    def encode(values: Any, into: bytearray) -> None:
        count = -1 if values is None else len(values)
        if flexible:
            _write_length(count + 1, into)
        else:
            into += head.pack(count)
        for value in values or ():
            item.encode(value, into)

    def decode(data: BytesIO) -> Any:
        count = _read_length(data) - 1 if flexible else head.unpack(data.read(head.size))[0]
        return None if count < 0 else [item.decode(data) for _ in range(count)]

    return _Codec(encode, decode)


def _nullable(one: _Codec) -> _Codec:
    def encode(value: Any, into: bytearray) -> None:
        into += b"\xff" if value is None else b"\x01"
        if value is not None:
            one.encode(value, into)

    return _Codec(encode, lambda data: one.decode(data) if data.read(1) == b"\x01" else None)


def _write_length(value: int, into: bytearray) -> None:
    while value > 0x7F:
        into.append(value & 0x7F | 0x80)
        value >>= 7
    into.append(value)


def _read_length(data: BytesIO) -> int:
    value = shift = 0
    while True:
        (byte,) = data.read(1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7


@cache
def load_messages(libs: Path) -> Mapping[str, Message]:
    """All messages by name, from the jar of Kafka's clients in this folder."""
    (jar,) = libs.glob("kafka-clients-*.jar")
    with zipfile.ZipFile(jar) as archive:
        texts = [archive.read(name).decode() for name in archive.namelist() if _is_message(name)]
    definitions = (json.loads(_COMMENTS.sub("", text)) for text in texts)
    found = [Message.from_definition(one) for one in definitions if one["type"] in {"request", "response"}]
    return {message.name: message for message in found}


def _is_message(name: str) -> bool:
    return name.startswith("common/message/") and name.endswith(".json")


@dataclass(frozen=True, slots=True)
class Api:
    """A kind of request with its answer."""

    request: Message
    answer: Message

    @classmethod
    def named(cls, messages: Mapping[str, Message], name: str) -> "Api":
        return cls(messages[f"{name}Request"], messages[f"{name}Response"])


class RawRequest:
    """A request in one version, as aiokafka's connections send it. Its answer is a dictionary."""

    def __init__(self, api: Api, version: int, values: Values) -> None:
        self._api = api
        self._values = values
        self.API_KEY = api.request.key
        self.API_VERSION = version
        self.RESPONSE_TYPE = self

    def prepare(self, _versions: object) -> "RawRequest":
        return self

    def build_request_header(self, correlation_id: int, client_id: str) -> Any:
        is_flexible = self._api.request.is_flexible(self.API_VERSION)
        header = RequestHeader_v2 if is_flexible else RequestHeader_v1
        return header(self, correlation_id=correlation_id, client_id=client_id)

    def encode(self) -> bytes:
        return self._api.request.encode(self.API_VERSION, self._values)

    def parse_response_header(self, data: BytesIO) -> Any:
        is_flexible = self._api.answer.is_flexible(self.API_VERSION)
        return (ResponseHeader_v1 if is_flexible else ResponseHeader_v0).decode(data)

    def decode(self, data: BytesIO) -> dict[str, Any]:
        return self._api.answer.decode(self.API_VERSION, data)
