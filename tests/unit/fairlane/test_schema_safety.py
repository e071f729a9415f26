"""Which schemas may read bytes: those for which any bytes take time and memory in proportion."""

import io
import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader
from hypothesis import given
from hypothesis import strategies as st

from fairlane.avro_validation import RecordScan, ScanError
from fairlane.schema_files import committed_schemas
from fairlane.schema_safety import MAX_FIXED_BYTES, MAX_SCHEMA_DEPTH, SchemaRefusedError, check_schema
from tests.kit.cpu_time import cpu_time


def record(name: str, *types: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": f"f{n}", "type": one} for n, one in enumerate(types)]}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def doubling(levels: int) -> dict[str, Any]:
    """Records of two records each: 2**levels values that take no bytes."""
    made = record("L0", "null", "null")
    for level in range(1, levels):
        made = record(f"L{level}", made, f"L{level - 1}")
    return made


def nested(depth: int) -> Any:
    made: Any = "string"
    for _ in range(depth):
        made = array(made)
    return record("R", made)


def test_the_committed_schemas_pass() -> None:
    for name in committed_schemas().record_names:
        for schema in committed_schemas().versions(name):
            check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (record("R", ["null", "R"]), "R.f0: recursive"),
        (record("R", array(record("S", ["null", "R"]))), "recursive"),
        (record("R", {"type": "map", "values": "R"}), "recursive"),
        (record("R", array("null")), "R.f0: list items that take no bytes"),
        (record("R", array(record("S"))), "list items that take no bytes"),
        (record("R", array(record("S", "null", record("T", "null")))), "list items that take no bytes"),
        (record("R", array({"type": "fixed", "name": "F", "size": 0})), "list items that take no bytes"),
        (record("R", record("S", "null"), array("S")), "R.f1: list items that take no bytes"),
        (record("R", array({"type": "null"})), "list items that take no bytes"),
        (nested(MAX_SCHEMA_DEPTH), "deep"),
        (nested(5_000), "deep"),
        (doubling(13), "more than 4096 types"),
        (doubling(30), "more than 4096 types"),
        (record("R", *["string"] * 4_200), "more than 4096 types"),
        (record("R", "elsewhere.Thing"), "unknown type"),
        (record("R", "nonsense"), "unknown type"),
        (record("R", []), "an empty union"),
        (record("R", [["null"]]), "a union within a union"),
        (record("R", 7), "no type"),
        (record("R", {"type": "fixed", "name": "F", "size": MAX_FIXED_BYTES + 1}), "fixed size"),
        (record("R", {"type": "fixed", "name": "F", "size": -1}), "fixed size"),
        (record("R", {"type": "fixed", "name": "F", "size": True}), "fixed size"),
        (record("R", {"type": "enum", "name": "E", "symbols": []}), "symbols"),
        (record("R", {"type": "long", "logicalType": "timestamp-millis"}), "a logical type"),
        (record("R", record("S", "long"), record("S", "string")), "a second type named S"),
        (record("R", record("R", "long")), "a second type named R"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}] * 2}, "two fields named a"),
        ({"type": "record", "name": "R"}, "without fields"),
        ({"type": "record", "name": "x" * 300, "fields": []}, "name"),
        ({"type": "record", "fields": []}, "name"),
        ({"type": "record", "name": "R", "fields": ["x"]}, "no field"),
        ({"type": "record", "name": "R", "namespace": 7, "fields": []}, "namespace"),
        (array("string"), "no record"),
        ("string", "no record"),
        (None, "no record"),
    ],
)
def test_hostile_schemas_are_refused_at_once(schema: object, reason: str) -> None:
    with cpu_time() as time, pytest.raises(SchemaRefusedError, match=reason):
        check_schema(schema)
    assert time.spent_s < 0.5


@pytest.mark.parametrize(
    "schema",
    [
        record("R"),
        record("R", "null", array(["null", "string"]), {"type": "map", "values": "null"}),
        record("R", record("S", "long"), array("S"), ["null", "S"]),
        record("R", array({"type": "enum", "name": "E", "symbols": ["A"]})),
        nested(MAX_SCHEMA_DEPTH - 2),
        doubling(10),
    ],
)
def test_harmless_schemas_pass(schema: object) -> None:
    check_schema(schema)


NAMES = st.sampled_from(["A", "B", "C"])
TYPES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string", "A", "B", "C"]),
    lambda inner: (
        st.builds(array, inner)
        | st.builds(lambda values: {"type": "map", "values": values}, inner)
        | st.lists(inner, min_size=1, max_size=3)
        | st.builds(lambda name, fields: record(name, *fields), NAMES, st.lists(inner, max_size=3))
        | st.builds(lambda name, size: {"type": "fixed", "name": name, "size": size}, NAMES, st.integers(0, 3))
        | st.builds(lambda name: {"type": "enum", "name": name, "symbols": ["X", "Y"]}, NAMES)
    ),
    max_leaves=8,
)
VARINTS = st.integers(0, 2**63 - 1).map(lambda value: value.to_bytes(10, "little"))


@given(st.lists(TYPES, max_size=3), st.binary(max_size=60))
def test_whatever_passes_reads_any_bytes_in_no_time(types: list[Any], body: bytes) -> None:
    """A count of any size in front of few bytes ends with these bytes."""
    schema = record("Top", *types)
    try:
        check_schema(schema)
    except SchemaRefusedError:
        return
    scan = RecordScan(schema, lambda _record, _field: 2**62)
    tracemalloc.start()
    try:
        with cpu_time() as time:
            for data in (body, b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f" + body, b"\x02" * 30 + body):
                with suppress(ScanError):
                    scan.check(data, 0)
                try:
                    parsed = parse_schema(json.loads(json.dumps(schema)))
                    schemaless_reader(io.BytesIO(data), parsed, None)
                except Exception:  # noqa: BLE001, S112 - whatever it raises it has ended
                    continue
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.spent_s < 1.0
    assert peak_bytes < 8_000_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "name", "fields", "items", "values", "symbols", "size", "namespace"]),
                inner | st.sampled_from(["record", "array", "map", "enum", "fixed"]),
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_passes_or_is_refused(schema: object) -> None:
    with suppress(SchemaRefusedError):
        check_schema(schema)


_WORDS = st.sampled_from(
    ["record", "array", "map", "enum", "fixed", "null", "string", "long", "R", "a.b", "type", "name", "fields", "items"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.just("values"), inner, max_size=5),
    max_leaves=12,
)


@given(_JSON, _JSON)
def test_whatever_is_registered_is_judged_or_refused(schema: Any, field_type: Any) -> None:
    for one in (schema, record("R", field_type), record("R", {"type": field_type})):
        with suppress(SchemaRefusedError):
            check_schema(one)
