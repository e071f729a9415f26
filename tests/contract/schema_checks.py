"""What must hold for a folder of schemas, as sentences about what does not."""

from itertools import permutations
from typing import Any

import avro.compatibility
import avro.schema

from fairlane.schema_files import fingerprint
from tests.contract.examples import examples_of
from tests.contract.schema_folder import SchemaFolder


def problems(folder: SchemaFolder) -> list[str]:
    """Everything that is wrong with a folder of schemas; none when it may be committed."""
    missing = [
        f"{file.name} is missing"
        for name, schema_id in folder.versions()
        if not (file := folder.file_of(name, schema_id)).exists()
    ]
    return missing or [
        *_stray_files(folder),
        *_changed_in_place(folder),
        *_incompatible(folder),
        *(
            f"{name}.{schema_id} has no example"
            for name, schema_id in folder.versions()
            if not examples_of(folder.path, name, schema_id)
        ),
    ]


def incompatibilities(reader: dict[str, Any], writer: dict[str, Any]) -> list[str]:
    """Why data of ``writer`` cannot be read with ``reader``; none when it can."""
    checker = avro.compatibility.ReaderWriterCompatibilityChecker()
    result = checker.get_compatibility(avro.schema.make_avsc_object(reader), avro.schema.make_avsc_object(writer))
    if result.compatibility is avro.compatibility.SchemaCompatibilityType.compatible:
        return []
    return sorted(result.messages) or ["incompatible"]


def _stray_files(folder: SchemaFolder) -> list[str]:
    named = {folder.file_of(name, schema_id) for name, schema_id in folder.versions()}
    return [f"{file.name} is of no id in ids.yaml" for file in sorted(folder.schema_files() - named)]


def _changed_in_place(folder: SchemaFolder) -> list[str]:
    recorded = folder.fingerprints()
    found = {schema_id: (name, fingerprint(folder.schema(name, schema_id))) for name, schema_id in folder.versions()}
    changed = [
        f"{name}.{schema_id} is not the schema that was committed under this id: give it a new id"
        for schema_id, (name, value) in found.items()
        if recorded.get(schema_id, value) != value
    ]
    unrecorded = [
        f"{name}.{schema_id} has no fingerprint" for schema_id, (name, _) in found.items() if schema_id not in recorded
    ]
    vanished = [f"schema id {schema_id} is gone from ids.yaml" for schema_id in sorted(recorded.keys() - found.keys())]
    return [*changed, *unrecorded, *vanished]


def _incompatible(folder: SchemaFolder) -> list[str]:
    """FULL_TRANSITIVE: every version of a record reads every other."""
    return [
        f"{name}: {reader} cannot read {writer}: {'; '.join(reasons)}"
        for name, ids in folder.ids().items()
        for reader, writer in permutations(ids, 2)
        if (reasons := incompatibilities(folder.schema(name, reader), folder.schema(name, writer)))
    ]
