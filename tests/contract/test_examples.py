import dataclasses
from typing import Any

import pytest

from fairlane.codec import DecodeError
from fairlane.records import type_by_name
from fairlane.schema_files import committed_schemas, data_path, default_codec
from tests.contract.examples import Example, all_examples, from_json, to_json

EXAMPLES = all_examples(data_path("schemas"))
CURRENT = [one for one in EXAMPLES if committed_schemas().writer(one.record_name)[0] == one.schema_id]


def _name(example: Example) -> str:
    return example.json_file.stem


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_example_decodes_to_its_json(example: Example) -> None:
    data = example.bytes_file.read_bytes()
    assert int.from_bytes(data[1:5], "big") == example.schema_id
    assert default_codec().decode(data) == example.record


@pytest.mark.parametrize("example", CURRENT, ids=_name)
def test_example_of_today_is_encoded_to_the_same_bytes(example: Example) -> None:
    data = example.bytes_file.read_bytes()
    assert default_codec().encode(default_codec().decode(data)) == data
    assert to_json(example.record) == example.plain, "an example of today names every field"


def test_every_file_is_half_of_an_example() -> None:
    named = {file for one in EXAMPLES for file in (one.json_file, one.bytes_file)}
    assert {file for file in (data_path("schemas") / "examples").iterdir() if file.name != "README.md"} == named


@pytest.mark.parametrize("name", type_by_name)
def test_every_optional_field_is_used_at_least_once(name: str) -> None:
    records = [one.record for one in CURRENT if one.record_name == name]
    unused = _fields_at_default(type_by_name[name], records)
    assert unused == set()


def _fields_at_default(record_type: Any, records: list[Any], path: str = "") -> set[str]:
    """Fields that have their default in every record, in parts too; a record inside another has its own examples."""
    unused = set()
    for entry in dataclasses.fields(record_type):
        values = [getattr(record, entry.name) for record in records]
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        if all(value == default for value in values):
            unused.add(f"{path}{entry.name}")
        inner = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        nested = [part for part in inner if dataclasses.is_dataclass(part)]
        if nested and type(nested[0]).__name__ not in type_by_name:
            unused |= _fields_at_default(type(nested[0]), nested, f"{path}{entry.name}.")
    return unused


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_truncated_example_is_a_decode_error(example: Example) -> None:
    data = example.bytes_file.read_bytes()
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            default_codec().decode(data[:length])
    with pytest.raises(DecodeError, match="trailing_bytes: 1 bytes after"):
        default_codec().decode(data + b"\x00")


def test_json_with_an_unknown_field_is_no_example() -> None:
    with pytest.raises(KeyError):
        from_json(type_by_name["ReplyChunk"], {"request_id": "r", "colour": "blue"})
