"""Validate Avro bytes against a schema without building objects. Pure.

The scan checks lengths, counts and union branches against the available bytes and against bounds. Avro writes a count
before its items, so a list of a million items is refused at its first byte. The scan takes one step per item within the
bounds, and one step per block of fixed-size items.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from fairlane.schema_safety import full_name

Bound = Callable[[str, str], int]
"""Maximum number of items in a list or map, by record name (without namespace) and field name."""

_Walk = Callable[[bytes, int], int]
"""Skip one value: from the bytes and its position to the position behind it."""

_FIXED_SIZES: Mapping[str, int] = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_MAX_VARINT_BYTES = 10
_MAX_LEADING_BYTES = 512


class ScanFault(StrEnum):
    """Kind of a scan error."""

    ENDS_EARLY = "ends early"
    TOO_MANY_ITEMS = "too many items"
    INVALID = "invalid"


class ScanError(ValueError):
    """The bytes are not a record of this schema within the bounds. ``field`` is the path to the faulty value."""

    def __init__(self, fault: ScanFault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason
        self.field = ""

    def within(self, name: str) -> "ScanError":
        """Prepend a field name or list index to the path. Returns the same error."""
        self.field = name + self.field if self.field.startswith("[") or not self.field else f"{name}.{self.field}"
        return self


class RecordScan:
    """Scanner for the records of one schema. Safe to share between threads.

    The schema must pass :func:`fairlane.schema_safety.check_schema`: not recursive, and no list items of zero bytes.
    """

    def __init__(self, schema: Mapping[str, Any], max_items: Bound) -> None:
        self._max_items = max_items
        self._named: dict[str, _Walk] = {}
        self._named_text: dict[str, _Walk] = {}
        self._check_text = False
        self._walk = self._of(schema, "", "", "")
        self._check_text, self._named = True, {}
        self._walk_texts = self._of(schema, "", "", "")
        self._leading = _leading_strings(schema)

    def check(self, data: bytes, start: int) -> None:
        """Check that a record begins at ``start``. Bytes behind it and the UTF-8 of its strings are not checked. Raises
        ScanError."""
        self._walk(data, start)

    def explain(self, data: bytes, start: int) -> ScanError | None:
        """The error in bytes that did not decode, invalid UTF-8 included; None when there is none."""
        try:
            self._walk_texts(data, start)
        except ScanError as error:
            return error
        return None

    def leading_strings(self, data: bytes, start: int) -> dict[str, str]:
        """The string fields at the beginning of the record, by name, up to the first that is too long or invalid."""
        found: dict[str, str] = {}
        position = start
        for name in self._leading:
            try:
                length, position = _long(data, position)
            except ScanError:
                break
            if not 0 <= length <= min(_MAX_LEADING_BYTES, len(data) - position):
                break
            try:
                found[name] = data[position : position + length].decode()
            except UnicodeDecodeError:
                break
            position += length
        return found

    def _of(self, schema: Any, namespace: str, record: str, field: str) -> _Walk:
        if isinstance(schema, str):
            return self._named.get(full_name(schema, namespace)) or self._primitive(schema)
        if isinstance(schema, list):
            return _union([self._of(branch, namespace, record, field) for branch in schema])
        kind = schema["type"]
        if kind == "array":
            size = _FIXED_SIZES.get(_name_of(schema["items"]))
            items = self._of(schema["items"], namespace, record, field)
            return _blocks(items, size, self._max_items(record, field))
        if kind == "map":
            values, key = self._of(schema["values"], namespace, record, field), self._primitive("string")
            return _blocks(lambda data, at: values(data, key(data, at)), None, self._max_items(record, field))
        if kind == "record":
            return self._record(schema, namespace)
        if kind == "enum":
            return self._define(schema, namespace, _enum(len(schema["symbols"])))
        if kind == "fixed":
            return self._define(schema, namespace, _fixed(schema["size"]))
        return self._of(kind, namespace, record, field)

    def _record(self, schema: Mapping[str, Any], namespace: str) -> _Walk:
        full = full_name(schema["name"], schema.get("namespace", namespace))
        inner, _, name = full.rpartition(".")
        steps = [(entry["name"], self._of(entry["type"], inner, name, entry["name"])) for entry in schema["fields"]]
        walk = self._named[full] = _fields(steps)
        return walk

    def _define(self, schema: Mapping[str, Any], namespace: str, walk: _Walk) -> _Walk:
        self._named[full_name(schema["name"], schema.get("namespace", namespace))] = walk
        return walk

    def _primitive(self, kind: str) -> _Walk:
        if kind in _FIXED_SIZES:
            return _fixed(_FIXED_SIZES[kind])
        if kind in {"int", "long"}:
            return _step_over_long
        return _text if kind == "string" and self._check_text else _bytes


def _name_of(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else schema
    return kind if isinstance(kind, str) else ""


def _leading_strings(schema: Mapping[str, Any]) -> tuple[str, ...]:
    names = []
    for entry in schema["fields"]:
        if _name_of(entry["type"]) != "string":
            break
        names.append(entry["name"])
    return tuple(names)


def _long(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint. Returns it and the position behind it."""
    try:
        byte = data[at]
        at += 1
        if byte < 0x80:
            return (byte >> 1) ^ -(byte & 1), at
        value, shift = byte & 0x7F, 7
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift >= 7 * _MAX_VARINT_BYTES:
                raise ScanError(ScanFault.INVALID, f"a number of more than {_MAX_VARINT_BYTES} bytes")
    except IndexError:
        raise _ends_early() from None
    value &= 2**64 - 1
    return (value >> 1) ^ -(value & 1), at


def _ends_early() -> ScanError:
    return ScanError(ScanFault.ENDS_EARLY, "the bytes end within it")


def _step_over_long(data: bytes, at: int) -> int:
    return _long(data, at)[1]


def _bytes(data: bytes, at: int) -> int:
    length, at = _long(data, at)
    if length < 0:
        raise ScanError(ScanFault.INVALID, "a negative length")
    at += length
    if at > len(data):
        raise ScanError(ScanFault.ENDS_EARLY, f"a length of {length} bytes is more than there are")
    return at


def _text(data: bytes, at: int) -> int:
    end = _bytes(data, at)
    start = _long(data, at)[1]
    try:
        data[start:end].decode()
    except UnicodeDecodeError:
        raise ScanError(ScanFault.INVALID, "no UTF-8") from None
    return end


def _fixed(size: int) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        at += size
        if at > len(data):
            raise _ends_early()
        return at

    return walk


def _enum(symbols: int) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        index, at = _long(data, at)
        if not 0 <= index < symbols:
            raise ScanError(ScanFault.INVALID, f"symbol {index} of {symbols}")
        return at

    return walk


def _union(branches: Sequence[_Walk]) -> _Walk:
    count = len(branches)

    def walk(data: bytes, at: int) -> int:
        branch, at = _long(data, at)
        if not 0 <= branch < count:
            raise ScanError(ScanFault.INVALID, f"branch {branch} of a union of {count}")
        return branches[branch](data, at)

    return walk


def _fields(steps: Sequence[tuple[str, _Walk]]) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        name = ""
        try:
            for name, step in steps:  # noqa: B007 - the handler names the field that failed
                at = step(data, at)
        except ScanError as error:
            raise error.within(name) from None
        return at

    return walk


def _blocks(item: _Walk, item_size: int | None, most: int) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        items = 0
        while True:
            count, at = _long(data, at)
            if count == 0:
                return at
            if count < 0:
                count = -count
                size, at = _long(data, at)
                if not 0 <= size <= len(data) - at:
                    raise ScanError(ScanFault.INVALID, f"a block of {size} bytes, of which {len(data) - at} are there")
            items += count
            if items > most:
                raise ScanError(ScanFault.TOO_MANY_ITEMS, f"{items} items are more than {most}")
            if item_size is not None:
                at += count * item_size
                if at > len(data):
                    raise _ends_early()
                continue
            index = items - count
            try:
                while index < items:
                    at = item(data, at)
                    index += 1
            except ScanError as error:
                raise error.within(f"[{index}]") from None

    return walk
