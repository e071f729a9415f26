"""Records that cannot be decoded, or not yet: none of them ends a reader, and none holds up the others."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.codec import Codec
from fairlane.records import InferenceReply, ReplyChunk
from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import RegistryError
from producers.gateway.pipeline import reader_thread
from producers.gateway.pipeline.reader_thread import REGISTRY_UNAVAILABLE, RecordDecoder
from tests.kit.waiting import eventually

TOPIC = "gateway.replies"
NEW_ID = 7_001
"""Of a schema that is registered while the gateway runs."""
NO_ID = 7_002


class Registry:
    """The committed schemas under the ids that they have, and one that the registry must be asked for."""

    def __init__(self) -> None:
        self.is_away = True
        self.has_new = False
        self.asked = 0
        self._files = committed_schemas()

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return self._files.writer(record_name)

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        if schema_id != NEW_ID:
            return self._files.reader(schema_id)
        assert self.is_loaded(schema_id), "a reader's thread asks nobody"
        return "InferenceReply", self._files.writer("InferenceReply")[1]

    def is_loaded(self, schema_id: int) -> bool:
        return self.has_new if schema_id == NEW_ID else schema_id != NO_ID

    def refresh(self) -> None:
        self.asked += 1
        if self.is_away:
            raise RegistryError("SCHEMA_REGISTRY_URL=http://registry: no answer")
        self.has_new = True


class World:
    """A decoder, and what came late."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.codec = Codec(self.registry)
        self.late: list[tuple[str, InferenceReply]] = []
        self.threads: set[str] = set()
        self.failures: list[BaseException] = []
        self.decoder = RecordDecoder(
            self.codec, InferenceReply, self._came, self.failures.append, Backoff(first_s=0.01, longest_s=0.05)
        )

    def _came(self, found: list[tuple[str, InferenceReply]]) -> None:
        self.threads.add(threading.current_thread().name)
        self.late += found

    def read(self, value: bytes | None) -> InferenceReply | None:
        return self.decoder.decode(message_of(value))

    def encoded(self, number: int, schema_id: int | None = None) -> bytes:
        value = self.codec.encode(reply(number))
        return value if schema_id is None else b"\0" + schema_id.to_bytes(4) + value[5:]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.decoder.close()
    assert not made.failures


def message_of(value: bytes | None) -> Any:
    return SimpleNamespace(topic=lambda: TOPIC, partition=lambda: 3, offset=lambda: 41, value=lambda: value)


def reply(number: int) -> InferenceReply:
    return InferenceReply(f"r-{number}", "acme", "ok")


@contextmanager
def passed_over(problem: str, count: int) -> Iterator[None]:
    """So many records are counted as that, within this block or soon after."""
    counter = metrics.GATEWAY_UNREADABLE.labels(record="InferenceReply", problem=problem)._value
    before = counter.get()
    yield
    eventually(lambda: counter.get() == before + count, what=f"{count} records of {problem}")


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, "empty"), (b"", "empty"), (b"secret text", "bad_magic"), (b"\0\0\0\0\xff", "unknown_schema_id")],
)
def test_what_is_no_record_is_counted_and_told_without_its_content(
    world: World, value: bytes | None, problem: str
) -> None:
    with capture_logs() as lines, passed_over(problem, 1):
        assert world.read(value) is None
    (line,) = lines
    assert (line["topic"], line["partition"], line["offset"], line["problem"]) == (TOPIC, 3, 41, problem)
    assert "secret" not in str(line)
    assert world.read(world.encoded(1)) == reply(1)


def test_another_type_of_record_is_passed_over(world: World) -> None:
    with passed_over("unexpected_type", 1):
        assert world.read(world.codec.encode(ReplyChunk("r-1", "acme", 1, 1, 0, "text"))) is None


def test_many_bad_records_make_a_few_lines(world: World) -> None:
    with capture_logs() as lines, passed_over("bad_magic", 1_000):
        for _ in range(1_000):
            world.read(b"rubbish")
    assert 1 <= len(lines) < 100


def test_a_record_whose_schema_the_registry_does_not_tell_comes_when_it_does(world: World) -> None:
    assert world.read(world.encoded(1, NEW_ID)) is None
    assert world.read(world.encoded(2)) == reply(2), "known schemas go on"
    eventually(lambda: world.registry.asked > 3, what="the registry to be asked again")
    assert not world.late
    world.registry.is_away = False
    eventually(lambda: world.late, what="what was held back")
    assert world.late == [(TOPIC, reply(1))]
    assert world.threads.isdisjoint({threading.current_thread().name})
    assert world.read(world.encoded(3, NEW_ID)) == reply(3), "the schema is known now"


def test_only_the_first_record_of_a_schema_asks_a_registry_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.decoder = RecordDecoder(
        world.codec, InferenceReply, world.late.extend, world.failures.append, Backoff(60.0, 60.0)
    )
    for number in range(20):
        assert world.read(world.encoded(number, NEW_ID)) is None
    eventually(lambda: world.registry.asked, what="a look-up")
    assert world.registry.asked == 1
    world.decoder.close()


def test_what_turns_out_to_be_no_schema_is_passed_over(world: World) -> None:
    with passed_over("unknown_schema_id", 2):
        world.read(world.encoded(1, NO_ID))
        world.read(world.encoded(2, NO_ID))
        world.read(world.encoded(3, NEW_ID))
        world.registry.is_away = False
    eventually(lambda: world.late == [(TOPIC, reply(3))], what="the other schema's record")


def test_no_more_is_held_back_than_may(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_thread, "MOST_HELD", 3)
    with passed_over(REGISTRY_UNAVAILABLE, 2):
        for number in range(5):
            world.read(world.encoded(number, NEW_ID))
    world.registry.is_away = False
    eventually(lambda: len(world.late) == 3, what="what was held back")
    # There is room again.
    world.registry.is_away = True
    world.read(world.encoded(9, NO_ID))
    world.registry.is_away = False
    assert [record for _, record in world.late] == [reply(number) for number in range(3)]


def test_a_listener_that_raises_is_told_of() -> None:
    failures: list[BaseException] = []
    registry = Registry()
    codec = Codec(registry)

    def raise_it(_found: object) -> None:
        raise ValueError

    decoder = RecordDecoder(codec, InferenceReply, raise_it, failures.append, Backoff(0.01, 0.01))
    value = b"\0" + NEW_ID.to_bytes(4) + codec.encode(reply(1))[5:]
    assert decoder.decode(message_of(value)) is None
    registry.is_away = False
    eventually(lambda: failures, what="the failure")
    assert isinstance(failures[0], ValueError)
