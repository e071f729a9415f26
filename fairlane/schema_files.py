"""Data files of the installation, and the committed schemas among them.

``schemas/*.avsc``, their ids in ``ids.yaml``, superseded versions in ``schemas/history``.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from fastavro import parse_schema

from fairlane.codec import Codec


def data_path(name: str) -> Path:
    """The path of a top-level data file or folder, e.g. ``schemas``: beside the package in a checkout, inside it in a
    wheel.

    Raises FileNotFoundError when the installation is incomplete.
    """
    package = Path(str(files("fairlane")))
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"{name}: neither in the package nor beside it; the installation is incomplete")


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


class SchemaFiles:
    """A :class:`fairlane.codec.SchemaSource` over the committed files; needs no registry."""

    def __init__(self, folder: Path) -> None:
        """Read all schemas. Raises ValueError for a duplicate id or a missing file."""
        ids: dict[str, list[int]] = yaml.safe_load((folder / "ids.yaml").read_text())
        self._writers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._readers: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._versions = {name: tuple(versions) for name, versions in ids.items()}
        for name, versions in ids.items():
            for schema_id in versions:
                current = schema_id == versions[-1]
                path = folder / f"{name}.avsc" if current else folder / "history" / f"{name}.{schema_id}.avsc"
                if not path.is_file():
                    raise ValueError(f"ids.yaml names schema {schema_id} of {name}, but {path} does not exist")
                if schema_id in self._readers:
                    raise ValueError(
                        f"ids.yaml gives schema id {schema_id} twice: {self._readers[schema_id][0]}, {name}"
                    )
                self._readers[schema_id] = (name, json.loads(path.read_text()))
            self._writers[name] = (versions[-1], self._readers[versions[-1]][1])

    @property
    def record_names(self) -> tuple[str, ...]:
        return tuple(self._writers)

    def versions(self, record_name: str) -> tuple[Mapping[str, Any], ...]:
        """All schemas that a record was ever written with, oldest first. Raises KeyError for an unknown name."""
        return tuple(self._readers[schema_id][1] for schema_id in self._versions[record_name])

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return self._writers[record_name]

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        return self._readers[schema_id]

    def is_loaded(self, schema_id: int) -> bool:  # noqa: ARG002 - there is nobody to ask
        return True

    def refresh(self) -> None:
        """Do nothing: files do not change."""


@cache
def committed_schemas() -> SchemaFiles:
    """The schemas shipped with this installation, read once."""
    return SchemaFiles(data_path("schemas"))


@cache
def default_codec() -> Codec:
    """The codec over the committed schemas."""
    return Codec(committed_schemas())
