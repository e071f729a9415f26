"""The golden examples: one file of bytes and one of JSON for every schema id, and more where one cannot show it all.

The JSON is written by a person, ``python -m tests.contract.examples`` makes the missing bytes from it, and bytes that
are there are never written again. Binary fields are base64 in the JSON.
"""

import base64
import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fairlane.records import type_by_name
from fairlane.schema_files import committed_schemas, data_path, default_codec

_FILE = re.compile(r"(?P<record>[A-Za-z]+)\.(?P<id>\d+)(-[a-z]+)?\.json")


@dataclass(frozen=True, slots=True)
class Example:
    """One example, named ``<Record>.<id>[-<variant>]``."""

    record_name: str
    schema_id: int
    json_file: Path

    @property
    def bytes_file(self) -> Path:
        return self.json_file.with_suffix(".bin")

    @property
    def plain(self) -> Any:
        """The committed JSON."""
        return json.loads(self.json_file.read_text(encoding="utf-8"))

    @property
    def record(self) -> Any:
        """The record that the JSON describes; fields that it does not name have their defaults."""
        return from_json(type_by_name[self.record_name], self.plain)


def all_examples(schemas: Path) -> list[Example]:
    """Every example of a folder of schemas, by name."""
    found = []
    for file in sorted((schemas / "examples").glob("*.json")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file}: an example is named <Record>.<id>.json or <Record>.<id>-<variant>.json")
        found.append(Example(match["record"], int(match["id"]), file))
    return found


def examples_of(schemas: Path, record_name: str, schema_id: int) -> list[Example]:
    return [one for one in all_examples(schemas) if (one.record_name, one.schema_id) == (record_name, schema_id)]


def to_json(value: Any) -> Any:
    """A record as plain JSON values, every field named."""
    if dataclasses.is_dataclass(value):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(annotation: Any, plain: Any) -> Any:
    """The value of this type that JSON values describe. Raises KeyError for a field that the type does not have."""
    if get_origin(annotation) in {UnionType, Union}:
        (inner,) = [argument for argument in get_args(annotation) if argument is not type(None)]
        return None if plain is None else from_json(inner, plain)
    if get_origin(annotation) is tuple:
        return tuple(from_json(get_args(annotation)[0], item) for item in plain)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = get_type_hints(annotation)
        return annotation(**{name: from_json(hints[name], value) for name, value in plain.items()})
    return base64.b64decode(plain) if annotation is bytes else plain


def main() -> None:
    """Write the bytes of every example of today's schemas that has none."""
    codec = default_codec()
    for example in all_examples(data_path("schemas")):
        if example.bytes_file.exists():
            continue
        if committed_schemas().writer(example.record_name)[0] != example.schema_id:
            raise SystemExit(f"{example.json_file.name}: schema {example.schema_id} is not written any more")
        example.bytes_file.write_bytes(codec.encode(example.record))
        sys.stdout.write(f"{example.bytes_file.name} written\n")


if __name__ == "__main__":
    main()
