import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fairlane.codec import Codec
from fairlane.records import InferenceReply, type_by_name
from fairlane.schema_files import SchemaFiles, canonical_form, data_path, fingerprint
from tests.contract.derive_schema import derive, main, write_schemas
from tests.contract.schema_checks import problems
from tests.contract.schema_folder import SchemaFolder

COMMITTED = SchemaFolder(data_path("schemas"))


@dataclass(frozen=True, slots=True)
class Part:
    """A part."""

    size: int = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole,
    in two lines."""

    name: str
    raw: bytes | None
    parts: tuple[Part, ...] = ()
    first: Part = field(default_factory=Part)
    ratio: float = 0.5
    labels: dict[str, str] = field(default_factory=dict)


def test_schema_follows_from_dataclass() -> None:
    part = {
        "type": "record",
        "name": "Part",
        "namespace": "fairlane",
        "doc": "A part.",
        "fields": [{"name": "size", "type": "long", "default": 3}],
    }
    assert derive(Whole) == {
        "type": "record",
        "name": "Whole",
        "namespace": "fairlane",
        "doc": "A whole, in two lines.",
        "fields": [
            {"name": "name", "type": "string"},
            {"name": "raw", "type": ["null", "bytes"]},
            {"name": "parts", "type": {"type": "array", "items": part}, "default": []},
            {"name": "first", "type": "fairlane.Part", "default": {"size": 3}},
            {"name": "ratio", "type": "double", "default": 0.5},
            {"name": "labels", "type": {"type": "map", "values": "string"}, "default": {}},
        ],
    }


@pytest.mark.parametrize(
    "annotation", [list[str], int | str, int | str | None, dict[str, int], tuple[int, str], object]
)
def test_type_without_counterpart_is_refused(annotation: Any) -> None:
    bad: type = dataclass(type("Bad", (), {"__annotations__": {"value": annotation}}))
    with pytest.raises(TypeError, match="no counterpart"):
        derive(bad)


@pytest.mark.parametrize("name", type_by_name)
def test_dataclass_is_schema(name: str) -> None:
    assert COMMITTED.schema(name, COMMITTED.ids()[name][-1]) == derive(type_by_name[name])


def test_every_record_has_ids() -> None:
    assert set(COMMITTED.ids()) == set(type_by_name)


def test_nested_record_is_the_same_everywhere() -> None:
    """A record inside another is the one that travels alone, and two copies of a part never differ."""
    seen: dict[str, str] = {}
    for name, schema_id in COMMITTED.versions():
        if schema_id == COMMITTED.ids()[name][-1]:
            for part, form in _records_in(COMMITTED.schema(name, schema_id)):
                assert seen.setdefault(part, form) == form, f"{part} in {name} differs from an earlier one"
    assert {"InferenceRequest", "SourceCoordinate"} <= seen.keys()


def _records_in(schema: Any) -> list[tuple[str, str]]:
    # Types that are named again only by their name are compared where they are spelt out.
    if isinstance(schema, list):
        return [found for branch in schema for found in _records_in(branch)]
    if not isinstance(schema, dict):
        return []
    if schema["type"] == "record":
        inner = [found for entry in schema["fields"] for found in _records_in(entry["type"])]
        return [(schema["name"], canonical_form(schema)), *inner]
    return _records_in(schema.get("items"))


def test_committed_schemas_hold() -> None:
    assert problems(COMMITTED) == []


@pytest.fixture
def folder(tmp_path: Path) -> SchemaFolder:
    shutil.copytree(COMMITTED.path, tmp_path / "schemas")
    (tmp_path / "schemas" / "history").mkdir(exist_ok=True)
    return SchemaFolder(tmp_path / "schemas")


Edit = Callable[[dict[str, Any]], None]


def _edit(folder: SchemaFolder, name: str, edit: Edit) -> None:
    schema = folder.schema(name, folder.ids()[name][-1])
    edit(schema)
    folder.current_file(name).write_text(json.dumps(schema))


def _new_version(folder: SchemaFolder, name: str, edit: Edit) -> int:
    """What schemas/README.md says: move, append an id, change, record the fingerprint, add an example."""
    old, new = folder.ids()[name][-1], max(schema_id for _, schema_id in folder.versions()) + 1
    shutil.copy(folder.current_file(name), folder.path / "history" / f"{name}.{old}.avsc")
    ids = folder.path / "ids.yaml"
    listed = f"{name}: {folder.ids()[name]}"
    assert listed in ids.read_text()
    ids.write_text(ids.read_text().replace(listed, f"{listed.removesuffix(']')}, {new}]"))
    _edit(folder, name, edit)
    folder.write_fingerprints({**folder.fingerprints(), new: fingerprint(folder.schema(name, new))})
    (folder.path / "examples" / f"{name}.{new}.json").write_text("{}")
    return new


def _field(name: str, avro_type: Any, **default: Any) -> Edit:
    return lambda schema: schema["fields"].append({"name": name, "type": avro_type, **default})


def _without(name: str) -> Edit:
    def edit(schema: dict[str, Any]) -> None:
        schema["fields"] = [entry for entry in schema["fields"] if entry["name"] != name]

    return edit


def _retyped(name: str, avro_type: Any) -> Edit:
    return lambda schema: next(entry for entry in schema["fields"] if entry["name"] == name).update(type=avro_type)


def _with_default(name: str, default: Any) -> Edit:
    return lambda schema: next(entry for entry in schema["fields"] if entry["name"] == name).update(default=default)


def _current(name: str) -> int:
    return COMMITTED.ids()[name][-1]


@pytest.mark.parametrize(
    "edit",
    [_field("note", ["null", "string"], default=None), _field("weight", "double", default=1.0), _without("replayed")],
    ids=["optional field", "field with default", "field with default removed"],
)
def test_compatible_change_with_new_id_passes(folder: SchemaFolder, edit: Edit) -> None:
    _new_version(folder, "InferenceReply", edit)
    assert problems(folder) == []


@pytest.mark.parametrize(
    "edit",
    [
        _field("note", "string"),
        _without("tenant"),
        _retyped("tenant", "long"),
        _retyped("batch_size", "double"),
    ],
    ids=[
        "field without default",
        "field without default removed",
        "other type",
        "wider type, one way only",
    ],
)
def test_incompatible_change_fails_even_with_new_id(folder: SchemaFolder, edit: Edit) -> None:
    new = _new_version(folder, "InferenceReply", edit)
    found = problems(folder)
    assert found
    assert all(one.startswith("InferenceReply: ") and str(new) in one for one in found)


@pytest.mark.parametrize(
    "edit",
    [
        _field("note", ["null", "string"], default=None),
        lambda schema: schema["fields"].reverse(),
        _with_default("replayed", True),
    ],
    ids=["field", "order", "default"],
)
def test_change_without_new_id_fails(folder: SchemaFolder, edit: Edit) -> None:
    _edit(folder, "InferenceReply", edit)
    (found,) = problems(folder)
    assert found.startswith(f"InferenceReply.{_current('InferenceReply')} is not the schema that was committed")


def test_change_of_documentation_needs_no_id(folder: SchemaFolder) -> None:
    _edit(folder, "InferenceReply", lambda schema: schema.update(doc="Said better."))
    assert problems(folder) == []


def test_changed_history_stray_file_and_vanished_id_fail(folder: SchemaFolder) -> None:
    _new_version(folder, "InferenceReply", _field("note", ["null", "string"], default=None))
    changed = _current("InferenceReply")
    history = folder.path / "history" / f"InferenceReply.{changed}.avsc"
    history.write_text(history.read_text().replace('"replayed"', '"repeated"'))
    (folder.path / "Other.avsc").write_text("{}")
    ids = folder.path / "ids.yaml"
    ids.write_text(ids.read_text().replace("ReplyChunk: [4]\n", ""))
    found = problems(folder)
    assert "Other.avsc is of no id in ids.yaml" in found
    assert "ReplyChunk.avsc is of no id in ids.yaml" in found
    assert "schema id 4 is gone from ids.yaml" in found
    assert any(one.startswith(f"InferenceReply.{changed} is not the schema") for one in found)


def test_missing_file_and_missing_example_fail(folder: SchemaFolder) -> None:
    for file in (folder.path / "examples").glob("ReplyChunk.*"):
        file.unlink()
    assert problems(folder) == ["ReplyChunk.4 has no example"]
    folder.current_file("ReplyChunk").unlink()
    assert problems(folder) == ["ReplyChunk.avsc is missing"]


def test_derive_writes_what_is_committed_and_refuses_a_changed_record(
    folder: SchemaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(folder.path)]) == 0
    for file in COMMITTED.schema_files() | {COMMITTED.path / "fingerprints.yaml"}:
        assert (folder.path / file.relative_to(COMMITTED.path)).read_text() == file.read_text()

    refused = write_schemas(folder, {"ReplyChunk": Whole})
    assert refused == ["ReplyChunk"]
    assert folder.current_file("ReplyChunk").read_text() == COMMITTED.current_file("ReplyChunk").read_text()

    (folder.path / "fingerprints.yaml").write_text("4: 0\n")
    assert main(["--folder", str(folder.path)]) == 1
    assert "history/ReplyChunk.4.avsc" in capsys.readouterr().err


def test_bytes_of_an_older_schema_are_read_with_its_defaults(folder: SchemaFolder) -> None:
    """Today's schema stands in for a later one: the older one lacks two of its fields and has one that went away."""

    def older(schema: dict[str, Any]) -> None:
        _without("replayed")(schema)
        _without("batch_size")(schema)
        _field("gone", "string", default="")(schema)

    today = json.loads(folder.current_file("InferenceReply").read_text())
    _edit(folder, "InferenceReply", older)
    old = Codec(SchemaFiles(folder.path))
    written = old.encode(InferenceReply("r-1", "acme", "ok", batch_size=4, replayed=True))
    _new_version(folder, "InferenceReply", lambda schema: schema.update(today))
    read = Codec(SchemaFiles(folder.path)).decode(written)
    assert read == InferenceReply("r-1", "acme", "ok")
