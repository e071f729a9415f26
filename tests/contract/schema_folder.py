"""The files of ``schemas/`` as data, so that checks can run on a changed copy too."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FINGERPRINTS_HEAD = """\
# What each schema id stands for: SHA-256 of the schema with full names and without documentation. Written by
# `python -m tests.contract.derive_schema`, for new ids only. A line here never changes: bytes with that id are in logs.
"""


@dataclass(frozen=True, slots=True)
class SchemaFolder:
    """A folder laid out like ``schemas/``."""

    path: Path

    def ids(self) -> dict[str, list[int]]:
        """The ids of each record, oldest first."""
        ids: dict[str, list[int]] = yaml.safe_load((self.path / "ids.yaml").read_text(encoding="utf-8"))
        return ids

    def fingerprints(self) -> dict[int, str]:
        """The recorded fingerprint of each id; empty when there is no file yet."""
        file = self.path / "fingerprints.yaml"
        recorded: dict[int, str] | None = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
        return recorded or {}

    def write_fingerprints(self, recorded: dict[int, str]) -> None:
        lines = (f"{schema_id}: {recorded[schema_id]}\n" for schema_id in sorted(recorded))
        (self.path / "fingerprints.yaml").write_text(_FINGERPRINTS_HEAD + "".join(lines), encoding="utf-8")

    def current_file(self, record_name: str) -> Path:
        return self.path / f"{record_name}.avsc"

    def file_of(self, record_name: str, schema_id: int) -> Path:
        """Where the schema of an id is, or should be."""
        if schema_id == self.ids()[record_name][-1]:
            return self.current_file(record_name)
        return self.path / "history" / f"{record_name}.{schema_id}.avsc"

    def schema(self, record_name: str, schema_id: int) -> dict[str, Any]:
        schema: dict[str, Any] = json.loads(self.file_of(record_name, schema_id).read_text(encoding="utf-8"))
        return schema

    def schema_files(self) -> set[Path]:
        """Every schema file there is."""
        return {*self.path.glob("*.avsc"), *self.path.glob("history/*.avsc")}

    def versions(self) -> Iterator[tuple[str, int]]:
        """Every record and id that ids.yaml names."""
        for name, ids in self.ids().items():
            for schema_id in ids:
                yield name, schema_id
