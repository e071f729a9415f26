"""Canonical form of Avro schemas: two texts of the same schema compare equal."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fastavro import parse_schema


def canonical_form(schema: Mapping[str, Any]) -> str:
    """The schema as JSON with full names, sorted keys and no documentation.

    Unlike Avro's parsing canonical form it keeps defaults: they decide how older records are read. Raises fastavro's
    SchemaParseException for an invalid schema.
    """
    return json.dumps(_stripped(parse_schema(dict(schema))), sort_keys=True, separators=(",", ":"))


def fingerprint(schema: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return hashlib.sha256(canonical_form(schema).encode()).hexdigest()


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        # A default is data, and may contain any key.
        return {
            key: item if key == "default" else _stripped(item)
            for key, item in value.items()
            if key != "doc" and not key.startswith("__")
        }
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    return value
