"""One suite over every source of schemas, and what is special about a registry."""

import json
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fairlane.codec import Codec, DecodeError, DecodeProblem, SchemaNotLoadedError, SchemaSource
from fairlane.records import ReplyChunk, TenantSpec, type_by_name
from fairlane.schema_files import committed_schemas, data_path, default_codec
from fairlane.schema_registry import (
    RegistryClient,
    RegistryError,
    RegistrySchemas,
    codec_for,
    subject_of,
    without_userinfo,
)
from fairlane.settings import KafkaSettings
from tests.contract.examples import all_examples
from tests.contract.registry_double import RegistryDouble, running_registry

EXAMPLES = all_examples(data_path("schemas"))
CHUNK = ReplyChunk("r-1", "acme", 1, 2, 3, "text", last=True)


@pytest.fixture
def empty_registry() -> Iterator[RegistryDouble]:
    with running_registry() as double:
        yield double


@pytest.fixture
def registry(empty_registry: RegistryDouble) -> RegistryDouble:
    """A registry that holds every committed schema."""
    client = RegistryClient(empty_registry.url)
    for name in committed_schemas().record_names:
        client.register(name, committed_schemas().versions(name))
    empty_registry.requests.clear()
    return empty_registry


def registry_id(registry: RegistryDouble, record: str) -> bytes:
    """The id that the registry gave the newest schema of a record, as it stands in the frame."""
    return struct.pack(">I", registry.subjects[subject_of(record)][-1])


@pytest.fixture(params=["files", "registry"])
def source(request: pytest.FixtureRequest) -> SchemaSource:
    if request.param == "files":
        return committed_schemas()
    double: RegistryDouble = request.getfixturevalue("registry")
    return RegistrySchemas(RegistryClient(double.url), committed_schemas())


def test_source_knows_every_record(source: SchemaSource) -> None:
    for name in type_by_name:
        schema_id, schema = source.writer(name)
        assert schema["name"] == name
        assert source.reader(schema_id) == (name, schema)
    assert len({source.writer(name)[0] for name in type_by_name}) == len(type_by_name)


def test_source_refuses_unknown_names_and_ids(source: SchemaSource) -> None:
    with pytest.raises(KeyError):
        source.writer("Unknown")
    for schema_id in (0, 99, 2**32 - 1):
        with pytest.raises(KeyError):
            source.reader(schema_id)


def test_source_serves_a_codec(source: SchemaSource) -> None:
    codec = Codec(source)
    for example in EXAMPLES:
        data = codec.encode(example.record)
        assert struct.unpack_from(">bI", data) == (0, source.writer(example.record_name)[0])
        assert data[5:] == default_codec().encode(example.record)[5:]
        assert codec.decode(data) == example.record
    with pytest.raises(DecodeError, match="schema id 77") as caught:
        codec.decode(struct.pack(">bI", 0, 77) + b"body")
    assert caught.value.problem is DecodeProblem.UNKNOWN_SCHEMA_ID


def test_codec_for_uses_committed_ids_unless_a_registry_is_named(registry: RegistryDouble) -> None:
    assert codec_for(KafkaSettings(schema_registry_url=None)) is default_codec()
    codec = codec_for(KafkaSettings(schema_registry_url=registry.url))
    assert codec.encode(CHUNK)[1:5] == registry_id(registry, "ReplyChunk")


def test_register_is_idempotent_and_asks_for_full_compatibility(empty_registry: RegistryDouble) -> None:
    schemas = committed_schemas().versions("ReplyChunk")
    (first,) = RegistryClient(empty_registry.url).register("ReplyChunk", schemas)
    (again,) = RegistryClient(empty_registry.url).register("ReplyChunk", schemas)
    assert (first.subject, first.version, first.schema_id, first.new) == ("fairlane.ReplyChunk", 1, 100, True)
    assert (again.version, again.schema_id, again.new) == (1, 100, False)
    assert empty_registry.compatibility == {"fairlane.ReplyChunk": "FULL_TRANSITIVE"}


def test_a_subject_that_lost_its_compatibility_level_gets_it_back(registry: RegistryDouble) -> None:
    registry.compatibility["fairlane.ReplyChunk"] = "NONE"
    RegistryClient(registry.url).register("ReplyChunk", committed_schemas().versions("ReplyChunk"))
    assert registry.compatibility["fairlane.ReplyChunk"] == "FULL_TRANSITIVE"


def test_a_compatibility_level_that_did_not_take_is_told(empty_registry: RegistryDouble) -> None:
    empty_registry.ignores_compatibility = True
    with pytest.raises(RegistryError, match=r"compatibility of fairlane\.ReplyChunk is not set"):
        RegistryClient(empty_registry.url).register("ReplyChunk", committed_schemas().versions("ReplyChunk"))


def test_empty_registry_is_refused_at_the_start(empty_registry: RegistryDouble) -> None:
    with pytest.raises(
        RegistryError, match=r"fairlane\.InferenceRequest .*it has no schema.*fairlane schemas register"
    ):
        RegistrySchemas(RegistryClient(empty_registry.url), committed_schemas())


def test_registry_with_another_schema_is_refused_at_the_start(registry: RegistryDouble) -> None:
    for schema in registry.schemas.values():
        schema["schema"] = schema["schema"].replace('"pool"', '"basin"')
    ids = ", ".join(map(str, registry.subjects["fairlane.WorkItem"]))
    assert ids.count(",") >= 1
    with pytest.raises(
        RegistryError, match=rf"fairlane\.WorkItem does not hold the committed schema \(its ids are {ids}\)"
    ):
        RegistrySchemas(RegistryClient(registry.url), committed_schemas())


def test_schema_text_may_be_spelt_in_another_way(registry: RegistryDouble) -> None:
    """A registry gives its own spelling back: other spaces and order, no redundant namespace, no documentation."""
    for schema in registry.schemas.values():
        plain = _respelt(json.loads(schema["schema"]), top=True)
        schema["schema"] = json.dumps(plain, sort_keys=True)
    source = RegistrySchemas(RegistryClient(registry.url), committed_schemas())
    assert source.writer("WorkItem")[1] == committed_schemas().writer("WorkItem")[1]


def _respelt(value: Any, *, top: bool = False) -> Any:
    if isinstance(value, dict):
        dropped = {"doc"} if top else {"doc", "namespace"}
        return {key: _respelt(item) for key, item in value.items() if key not in dropped}
    return [_respelt(item) for item in value] if isinstance(value, list) else value


def test_id_that_appears_later_is_fetched_once(registry: RegistryDouble) -> None:
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    newer = json.loads(json.dumps(committed_schemas().writer("ReplyChunk")[1]))
    newer["fields"].insert(0, {"name": "colour", "type": "string", "default": ""})
    schema_id = registry.add(subject_of("ReplyChunk"), json.dumps(newer))
    data = struct.pack(">bI", 0, schema_id) + b"\x08blue" + default_codec().encode(CHUNK)[5:]
    registry.requests.clear()
    assert [codec.decode(data), codec.decode(data)] == [CHUNK, CHUNK]
    listed = [("GET", f"/subjects/{subject_of(name)}/versions") for name in committed_schemas().record_names]
    assert sorted(registry.requests) == sorted([*listed, ("GET", f"/subjects/{subject_of('ReplyChunk')}/versions/2")])


def test_versions_known_at_the_start_need_no_later_request(registry: RegistryDouble) -> None:
    newer = json.loads(json.dumps(committed_schemas().writer("ReplyChunk")[1]))
    newer["fields"].append({"name": "colour", "type": "string", "default": ""})
    known = registry_id(registry, "ReplyChunk")
    schema_id = registry.add(subject_of("ReplyChunk"), json.dumps(newer))
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    registry.answer_with = (500, {"error_code": 500, "message": "down"})
    assert codec.encode(CHUNK)[1:5] == known, "written with the schema this code was made for"
    body = default_codec().encode(CHUNK)[5:]
    assert codec.decode(struct.pack(">bI", 0, schema_id) + body + b"\x08blue") == CHUNK


def test_missing_id_is_not_asked_for_again_at_once(registry: RegistryDouble) -> None:
    now = 0.0
    source = RegistrySchemas(RegistryClient(registry.url), committed_schemas(), clock=lambda: now)
    registry.requests.clear()
    for _ in range(3):
        with pytest.raises(KeyError):
            source.reader(500)
    assert len(registry.requests) == len(committed_schemas().record_names), "asked for once"
    now = 31.0
    registry.next_id = 500
    registry.add(subject_of("ReplyChunk"), json.dumps(dict(committed_schemas().writer("ReplyChunk")[1], doc="later")))
    assert source.reader(500)[0] == "ReplyChunk"


@pytest.mark.parametrize(
    ("text", "schema_type"),
    [
        ('{"type": "record", "name": "ReplyChunk", "namespace": "other", "fields": []}', "AVRO"),
        ('{"type": "record", "name": "Unknown", "namespace": "fairlane", "fields": []}', "AVRO"),
        ('{"type": "record", "name": "fairlane.ReplyChunk", "fields": [{"name": "a", "type": "nonsense"}]}', "AVRO"),
        ('"string"', "AVRO"),
        ("{", "AVRO"),
        ('{"type": "object"}', "JSON"),
        ('syntax = "proto3";', "PROTOBUF"),
    ],
)
def test_id_of_a_foreign_schema_is_unknown(registry: RegistryDouble, text: str, schema_type: str) -> None:
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    schema_id = registry.add("other", text, schema_type)
    with pytest.raises(DecodeError) as caught:
        codec.decode(struct.pack(">bI", 0, schema_id) + b"\x00")
    assert caught.value.problem is DecodeProblem.UNKNOWN_SCHEMA_ID


def test_namesakes_of_our_records_under_other_subjects_are_unknown(registry: RegistryDouble) -> None:
    """Whoever may register a schema somewhere must not decide how our bytes are read."""
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    newer = json.loads(json.dumps(committed_schemas().writer("ReplyChunk")[1]))
    newer["fields"].append({"name": "colour", "type": "string", "default": ""})
    body = default_codec().encode(CHUNK)[5:] + b"\x08blue"
    schema_id = registry.add("somebody-elses", json.dumps(newer))
    with pytest.raises(DecodeError) as caught:
        codec.decode(struct.pack(">bI", 0, schema_id) + body)
    assert caught.value.problem is DecodeProblem.UNKNOWN_SCHEMA_ID

    # The same one under ours, as soon as it is asked for again.
    registry.add(subject_of("ReplyChunk"), json.dumps(newer))
    again = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    assert again.decode(struct.pack(">bI", 0, schema_id) + body) == CHUNK


@pytest.mark.parametrize(
    ("type_of_field", "reason"),
    [
        ({"type": "array", "items": "null"}, "list items that take no bytes"),
        (["null", "fairlane.ReplyChunk"], "recursive"),
        ({"type": "array", "items": "elsewhere.Thing"}, "unknown type"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "a logical type"),
    ],
)
def test_a_hostile_schema_under_our_own_subject_is_not_used(
    registry: RegistryDouble, type_of_field: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = json.loads(json.dumps(committed_schemas().writer("ReplyChunk")[1]))
    hostile["fields"].append({"name": "more", "type": type_of_field, "default": None})
    schema_id = registry.add(subject_of("ReplyChunk"), json.dumps(hostile))
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    assert reason in caplog.text
    with pytest.raises(DecodeError) as caught:
        codec.decode(struct.pack(">bI", 0, schema_id) + default_codec().encode(CHUNK)[5:] + b"\xfe" * 9)
    assert caught.value.problem is DecodeProblem.UNKNOWN_SCHEMA_ID
    assert codec.decode(codec.encode(CHUNK)) == CHUNK


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"type": "record", "name": "fairlane.ReplyChunk", "fields": [], "doc": "' + "x" * 300_000 + '"}'],
    ids=["nested", "long"],
)
def test_schema_texts_that_are_dear_to_read_are_not_read(registry: RegistryDouble, text: str) -> None:
    schema_id = registry.add(subject_of("ReplyChunk"), text)
    source = RegistrySchemas(RegistryClient(registry.url), committed_schemas())
    with pytest.raises(KeyError):
        source.reader(schema_id)


def test_what_is_not_loaded_is_not_asked_for_unless_that_is_wanted(registry: RegistryDouble) -> None:
    source = RegistrySchemas(RegistryClient(registry.url), committed_schemas())
    codec = Codec(source)
    newer = json.loads(json.dumps(committed_schemas().writer("ReplyChunk")[1]))
    newer["fields"].append({"name": "colour", "type": "string", "default": ""})
    schema_id = registry.add(subject_of("ReplyChunk"), json.dumps(newer))
    data = struct.pack(">bI", 0, schema_id) + default_codec().encode(CHUNK)[5:] + b"\x08blue"
    registry.requests.clear()
    assert not codec.is_loaded(data)
    with pytest.raises(SchemaNotLoadedError, match=str(schema_id)):
        codec.decode_any((ReplyChunk,), data, may_ask=False)
    assert not registry.requests
    source.refresh()
    assert codec.is_loaded(data)
    assert codec.decode_any((ReplyChunk,), data, may_ask=False) == CHUNK


def test_a_registry_that_answers_slowly_is_given_up(registry: RegistryDouble) -> None:
    now = iter(range(0, 1_000_000, 6))
    source = RegistrySchemas(RegistryClient(registry.url), committed_schemas(), clock=lambda: next(now))
    with pytest.raises(RegistryError, match="did not answer within 15 s"):
        source.refresh()


def test_outage_is_not_blamed_on_the_record(registry: RegistryDouble) -> None:
    codec = Codec(RegistrySchemas(RegistryClient(registry.url), committed_schemas()))
    registry.answer_with = (500, {"error_code": 50001, "message": "store is down"})
    with pytest.raises(RegistryError, match=r"store is down \(status 500\)"):
        codec.decode(struct.pack(">bI", 0, 900) + b"body")
    registry.answer_with = None
    with pytest.raises(DecodeError, match="schema id 900"):
        codec.decode(struct.pack(">bI", 0, 900) + b"body")


@pytest.mark.parametrize("answer", [(200, b"<html>"), (200, b""), (200, {"versions": 3}), (401, {"message": "no"})])
def test_nonsense_from_the_other_end_is_one_error(empty_registry: RegistryDouble, answer: tuple[int, Any]) -> None:
    empty_registry.answer_with = answer
    with pytest.raises(RegistryError, match="SCHEMA_REGISTRY_URL=http://127"):
        RegistrySchemas(RegistryClient(empty_registry.url), committed_schemas())


def test_unreachable_registry_and_bad_url_are_named_without_credentials() -> None:
    with pytest.raises(RegistryError, match=r"SCHEMA_REGISTRY_URL=http://127\.0\.0\.1:1: ") as caught:
        RegistrySchemas(RegistryClient("http://user:hunter2@127.0.0.1:1"), committed_schemas())
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RegistryError, match="must be an http or https URL"):
        RegistryClient("ftp://registry")
    assert without_userinfo("https://u:p@host:8081/x") == "https://host:8081/x"


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    with pytest.raises(RegistryError, match=r"needs the extra fairlane\[registry\]"):
        RegistryClient("http://127.0.0.1:1")


def test_record_of_another_schema_is_an_unexpected_type(source: SchemaSource) -> None:
    codec = Codec(source)
    with pytest.raises(DecodeError) as caught:
        codec.decode_as(TenantSpec, codec.encode(CHUNK))
    assert caught.value.problem is DecodeProblem.UNEXPECTED_TYPE
