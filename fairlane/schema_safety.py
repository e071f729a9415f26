"""Check whether a schema written by others is safe to decode with. Pure.

Bytes are decoded with the schema that they name, so a schema decides what decoding costs. A recursive schema lets a few
bytes nest until the stack overflows; list items of zero bytes let a ten-byte count stand for any number of items.
Neither can be detected from the bytes in time, so such schemas are refused, as are oversized ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SCHEMA_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_NODES = 4_096
"""A named type counts every time it is used: records of records of records double with every level."""

MAX_FIXED_BYTES = 65_536
_MAX_NAME_CHARS = 256

# Minimum size of a value, in bytes.
_PRIMITIVES: Mapping[str, int] = {
    "null": 0,
    "boolean": 1,
    "int": 1,
    "long": 1,
    "float": 4,
    "double": 8,
    "bytes": 1,
    "string": 1,
}


class SchemaRefusedError(ValueError):
    """This schema is not used; the message names the part that is the reason."""


@dataclass(frozen=True, slots=True)
class _Size:
    nodes: int
    min_bytes: int
    depth: int


def check_schema(schema: object) -> None:
    """Check that decoding any bytes with this schema takes time and memory in proportion to their length.

    The schema must be a record. A named type must be complete before it is used again; unknown types are refused.
    Raises SchemaRefusedError.
    """
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise SchemaRefusedError("no record")
    _Judge().size(schema, "", _name(schema), 1)


@dataclass(slots=True)
class _Judge:
    _named: dict[str, _Size | None] = field(default_factory=dict)
    """None while the type is being defined."""

    def size(self, schema: object, namespace: str, path: str, depth: int) -> _Size:
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefusedError(f"{path}: nested more than {MAX_SCHEMA_DEPTH} deep")
        found = self._size(schema, namespace, path, depth)
        if found.nodes > MAX_SCHEMA_NODES:
            raise SchemaRefusedError(f"{path}: more than {MAX_SCHEMA_NODES} types")
        if depth + found.depth - 1 > MAX_SCHEMA_DEPTH:
            raise SchemaRefusedError(f"{path}: nested more than {MAX_SCHEMA_DEPTH} deep")
        return found

    def _size(self, schema: object, namespace: str, path: str, depth: int) -> _Size:
        if isinstance(schema, str):
            return self._reference(schema, namespace, path)
        if isinstance(schema, list):
            return self._union(schema, namespace, path, depth)
        if not isinstance(schema, dict):
            raise SchemaRefusedError(f"{path}: no type")
        if "logicalType" in schema:
            # fastavro would decode it to another Python type than the record's field has.
            raise SchemaRefusedError(f"{path}: a logical type")
        kind = schema.get("type")
        if kind == "array":
            items = self.size(schema.get("items"), namespace, path, depth + 1)
            if items.min_bytes == 0:
                raise SchemaRefusedError(f"{path}: list items that take no bytes")
            return _Size(items.nodes + 1, 1, items.depth + 1)
        if kind == "map":
            values = self.size(schema.get("values"), namespace, path, depth + 1)
            return _Size(values.nodes + 1, 1, values.depth + 1)
        if kind == "record":
            return self._record(schema, namespace, path, depth)
        if isinstance(kind, str) and kind in {"enum", "fixed"}:
            return self._leaf(schema, namespace, path)
        return self.size(kind, namespace, path, depth + 1)

    def _reference(self, name: str, namespace: str, path: str) -> _Size:
        if name in _PRIMITIVES:
            return _Size(1, _PRIMITIVES[name], 1)
        full = full_name(name, namespace)
        if full not in self._named:
            raise SchemaRefusedError(f"{path}: unknown type")
        known = self._named[full]
        if known is None:
            raise SchemaRefusedError(f"{path}: recursive")
        return known

    def _union(self, branches: list[Any], namespace: str, path: str, depth: int) -> _Size:
        if not branches:
            raise SchemaRefusedError(f"{path}: an empty union")
        if any(isinstance(branch, list) for branch in branches):
            raise SchemaRefusedError(f"{path}: a union within a union")
        nodes, deepest = 1, 0
        for branch in branches:
            size = self.size(branch, namespace, path, depth + 1)
            nodes, deepest = nodes + size.nodes, max(deepest, size.depth)
        return _Size(nodes, 1, deepest + 1)

    def _record(self, schema: Mapping[str, Any], namespace: str, path: str, depth: int) -> _Size:
        full = self._define(schema, namespace, path)
        inner = full.rpartition(".")[0]
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise SchemaRefusedError(f"{path}: a record without fields")
        nodes, min_bytes, deepest = 1, 0, 0
        names: set[str] = set()
        for entry in fields:
            if not isinstance(entry, dict):
                raise SchemaRefusedError(f"{path}: no field")
            name = _name(entry)
            if name in names:
                raise SchemaRefusedError(f"{path}: two fields named {name}")
            names.add(name)
            size = self.size(entry.get("type"), inner, f"{path}.{name}", depth + 1)
            nodes, min_bytes, deepest = nodes + size.nodes, min_bytes + size.min_bytes, max(deepest, size.depth)
            if nodes > MAX_SCHEMA_NODES:
                raise SchemaRefusedError(f"{path}: more than {MAX_SCHEMA_NODES} types")
        known = self._named[full] = _Size(nodes, min_bytes, deepest + 1)
        return known

    def _leaf(self, schema: Mapping[str, Any], namespace: str, path: str) -> _Size:
        full = self._define(schema, namespace, path)
        min_bytes = 1
        if schema["type"] == "enum":
            symbols = schema.get("symbols")
            if not isinstance(symbols, list) or not symbols or not all(isinstance(one, str) for one in symbols):
                raise SchemaRefusedError(f"{path}: an enum without symbols")
        else:
            min_bytes = schema.get("size")  # type: ignore[assignment]  # judged in the next line
            if type(min_bytes) is not int or not 0 <= min_bytes <= MAX_FIXED_BYTES:
                raise SchemaRefusedError(f"{path}: a fixed size that is not from 0 to {MAX_FIXED_BYTES}")
        known = self._named[full] = _Size(1, min_bytes, 1)
        return known

    def _define(self, schema: Mapping[str, Any], namespace: str, path: str) -> str:
        given = schema.get("namespace", namespace)
        if not isinstance(given, str):
            raise SchemaRefusedError(f"{path}: a namespace that is no text")
        full = full_name(_name(schema), given)
        if full in self._named or full in _PRIMITIVES:
            raise SchemaRefusedError(f"{path}: a second type named {full}")
        self._named[full] = None
        return full


def _name(schema: Mapping[str, Any]) -> str:
    name = schema.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise SchemaRefusedError("a type or field without a name, or with one that is too long")
    return name


def full_name(name: str, namespace: str | None) -> str:
    """The name of a type with its namespace, which a name with a dot has already."""
    return name if "." in name or not namespace else f"{namespace}.{name}"
