"""Kafka's messages as bytes, by definitions in its own notation."""

from uuid import UUID

import pytest
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from tests.hostile_tenant.messages import Message, Versions

DEFINITION = {
    "apiKey": 7,
    "name": "ExampleRequest",
    "validVersions": "1-3",
    "flexibleVersions": "2+",
    "fields": [
        {"name": "Name", "type": "string", "versions": "0+"},
        {"name": "Code", "type": "int16", "versions": "1-2", "default": "-1"},
        {
            "name": "Parts",
            "type": "[]Part",
            "versions": "0+",
            "fields": [{"name": "Id", "type": "uuid", "versions": "0+"}],
        },
        {"name": "Extra", "type": "Extra", "versions": "3+", "nullableVersions": "3+", "default": "null"},
        {"name": "Hint", "type": "int32", "versions": "2+", "taggedVersions": "2+", "tag": 3},
    ],
    "commonStructs": [
        {"name": "Extra", "versions": "3+", "fields": [{"name": "On", "type": "bool", "versions": "3+"}]}
    ],
}
MESSAGE = Message.from_definition(DEFINITION)
PARTS = [{"Id": UUID(int=5)}, {"Id": UUID(int=6)}]


@pytest.mark.parametrize(
    ("text", "first", "last"), [("3", 3, 3), ("0-12", 0, 12), ("4+", 4, 32_767), ("none", 0, -1), (None, 0, -1)]
)
def test_versions(text: str | None, first: int, last: int) -> None:
    assert Versions.parse(text) == Versions(first, last)


def test_what_two_ranges_have_in_common() -> None:
    assert Versions(1, 5).common(Versions(3, 9)) == Versions(3, 5)
    assert 4 in Versions(3, 5)
    assert 2 not in Versions(3, 5)


def test_fields_that_are_not_given_have_their_defaults() -> None:
    assert MESSAGE.decode(1, MESSAGE.encode(1, {})) == {"Name": "", "Code": -1, "Parts": []}
    assert MESSAGE.decode(3, MESSAGE.encode(3, {})) == {"Name": "", "Parts": [], "Extra": None}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_what_is_written_is_read(version: int) -> None:
    given = {"Name": "r\u00e9quests", "Code": 9, "Parts": PARTS, "Extra": {"On": True}}
    found = MESSAGE.decode(version, MESSAGE.encode(version, given))
    expected = {name for name in given if name in {"Name", "Parts"} | ({"Code"} if version < 3 else {"Extra"})}
    assert found == {name: given[name] for name in expected}


def test_a_flexible_version_is_written_as_aiokafka_writes_it() -> None:
    schema = Schema(
        ("name", CompactString("utf-8")), ("code", Int16), ("parts", CompactArray(Int32)), ("t", TaggedFields)
    )
    assert MESSAGE.encode(2, {"Name": "x" * 300, "Code": 9}) == schema.encode(["x" * 300, 9, [], {}])


def test_tagged_fields_are_written_and_skipped() -> None:
    with_tag = MESSAGE.encode(2, {"Name": "x", "Hint": 1})
    assert with_tag.endswith(b"\x01\x03\x04\x00\x00\x00\x01")
    assert MESSAGE.decode(2, with_tag) == {"Name": "x", "Code": -1, "Parts": []}


def test_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="no field Nmae"):
        MESSAGE.encode(1, {"Nmae": "x"})
