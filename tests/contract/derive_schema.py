"""The Avro schema that follows from a record's dataclass, and a command that writes it.

``python -m tests.contract.derive_schema`` rewrites ``schemas/*.avsc`` and records the fingerprint of a new id.
It refuses to change what an id stands for; schemas/README.md says what to do then.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fairlane.records import type_by_name
from fairlane.schema_files import data_path, fingerprint
from tests.contract.schema_folder import SchemaFolder

_NAMESPACE = "fairlane"
_PRIMITIVES = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


def derive(record_type: type) -> dict[str, Any]:
    """The schema of a dataclass. Raises TypeError for a field of a type that has no counterpart."""
    return _record(record_type, set())


def write_schemas(folder: SchemaFolder, types: Mapping[str, type] = type_by_name) -> list[str]:
    """Write the schema of every record, and the fingerprint of each new id. Returns the records it refused."""
    recorded, refused = folder.fingerprints(), []
    for name, record_type in types.items():
        schema = derive(record_type)
        current = folder.ids()[name][-1]
        if recorded.setdefault(current, fingerprint(schema)) != fingerprint(schema):
            refused.append(name)
        else:
            text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
            folder.current_file(name).write_text(text, encoding="utf-8")
    if not refused:
        folder.write_fingerprints(recorded)
    return refused


def _record(record_type: type, seen: set[str]) -> dict[str, Any]:
    seen.add(record_type.__name__)
    hints = get_type_hints(record_type)
    schema_fields = []
    for entry in dataclasses.fields(record_type):
        schema_field = {"name": entry.name, "type": _type(hints[entry.name], seen)}
        default = _default(entry)
        if default is not dataclasses.MISSING:
            schema_field["default"] = _plain(default)
        schema_fields.append(schema_field)
    return {
        "type": "record",
        "name": record_type.__name__,
        "namespace": _NAMESPACE,
        "doc": " ".join((record_type.__doc__ or "").split()),
        "fields": schema_fields,
    }


def _type(annotation: Any, seen: set[str]) -> Any:
    if annotation in _PRIMITIVES:
        return _PRIMITIVES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {UnionType, Union} and len(arguments) == 2 and type(None) in arguments:
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return ["null", _type(inner, seen)]
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _type(arguments[0], seen)}
    if origin is dict and arguments == (str, str):
        return {"type": "map", "values": "string"}
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        # Avro spells a type out once and then calls it by its name.
        full_name = f"{_NAMESPACE}.{annotation.__name__}"
        return full_name if annotation.__name__ in seen else _record(annotation, seen)
    raise TypeError(f"{annotation!r} has no counterpart in Avro that the codec knows")


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the schemas of this checkout; 1 when a schema changed and has no new id."""
    parser = argparse.ArgumentParser(description="Write schemas/*.avsc from the dataclasses in fairlane/records.py.")
    parser.add_argument("--folder", type=Path, default=None, help="another folder than schemas/")
    folder = SchemaFolder(parser.parse_args(arguments).folder or data_path("schemas"))
    refused = write_schemas(folder)
    for name in refused:
        current = folder.ids()[name][-1]
        sys.stderr.write(
            f"{name}: the dataclass is not schema {current} any more; move schemas/{name}.avsc to"
            f" schemas/history/{name}.{current}.avsc and append a new id to ids.yaml (see schemas/README.md)\n"
        )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
