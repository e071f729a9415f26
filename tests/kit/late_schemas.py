"""A schema registry in memory: one schema id is registered late, and the registry may be unavailable."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import RegistryError

LATE_ID = 900


@dataclass
class LateSchemas:
    """Source of the committed schemas, and of the record type ``late`` under ``LATE_ID`` once it is registered."""

    late: type
    is_available: bool = True
    is_registered: bool = True
    is_late_loaded: bool = False
    look_ups: int = 0

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return committed_schemas().writer(record_name)

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        if schema_id != LATE_ID:
            return committed_schemas().reader(schema_id)
        if not self.is_late_loaded:
            self.refresh()
        if not self.is_late_loaded:
            raise KeyError(schema_id)
        return self.late.__name__, self.writer(self.late.__name__)[1]

    def is_loaded(self, schema_id: int) -> bool:
        return schema_id != LATE_ID or self.is_late_loaded

    def refresh(self) -> None:
        self.look_ups += 1
        if not self.is_available:
            raise RegistryError("no answer")
        self.is_late_loaded = self.is_registered


def late(encoded: bytes) -> bytes:
    """The same record, written with the late schema id."""
    return encoded[:1] + struct.pack(">I", LATE_ID) + encoded[5:]
