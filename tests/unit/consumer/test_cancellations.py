"""What a consumer knows of cancelled requests, and how it follows the topic where it hears of them."""

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from fairlane.codec import Codec
from fairlane.names import CONTROL_CANCELLATIONS
from fairlane.records import Cancellation, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.feeds import FeedUnavailableError
from inference_consumers.cancellations import KNOWN_FOR_MS, CancellationFeed, Cancellations
from tests.kit.late_schemas import LateSchemas, late
from tests.kit.waiting import eventually

NOW_MS = 1_000_000
CODEC = default_codec()


@pytest.fixture
def known() -> Cancellations:
    return Cancellations()


# What is known


def test_an_id_is_cancelled_for_its_tenant_alone(known: Cancellations) -> None:
    known.add("acme", "a", NOW_MS)
    assert known.is_cancelled("acme", "a")
    assert not known.is_cancelled("acme", "b")
    assert not known.is_cancelled("other", "a")


def test_what_is_sent_after_its_cancel_is_wanted(known: Cancellations) -> None:
    known.add("acme", "a", NOW_MS + 20, requested_at_ms=NOW_MS)
    assert known.is_cancelled("acme", "a", NOW_MS)
    assert not known.is_cancelled("acme", "a", NOW_MS + 1)
    known.add("acme", "a", NOW_MS + 30, requested_at_ms=NOW_MS + 2)
    known.add("acme", "a", NOW_MS + 40, requested_at_ms=NOW_MS - 5)
    assert known.is_cancelled("acme", "a", NOW_MS + 1)
    assert len(known) == 1


def test_an_id_is_known_for_ten_minutes_since_it_was_heard_of_last(known: Cancellations) -> None:
    known.add("acme", "a", NOW_MS)
    known.add("acme", "b", NOW_MS + 1)
    known.add("acme", "a", NOW_MS + 2)
    known.add("acme", "c", NOW_MS + KNOWN_FOR_MS)
    assert known.is_cancelled("acme", "b")
    known.add("acme", "d", NOW_MS + KNOWN_FOR_MS + 1)
    assert [known.is_cancelled("acme", name) for name in "abcd"] == [True, False, True, True]
    known.add("other", "e", NOW_MS + 3 * KNOWN_FOR_MS)
    assert len(known) == 1


def test_a_flood_pushes_out_its_own_oldest() -> None:
    known = Cancellations(max_known=5)
    known.add("quiet", "a", NOW_MS)
    for number in range(100):
        known.add("flood", str(number), NOW_MS)
    assert len(known) == 5
    assert known.is_cancelled("quiet", "a")
    assert [number for number in range(100) if known.is_cancelled("flood", str(number))] == [96, 97, 98, 99]


def test_what_is_forgotten_is_not_cancelled(known: Cancellations) -> None:
    known.add("acme", "a", NOW_MS)
    known.forget("acme", "a")
    known.forget("acme", "a")
    assert not known.is_cancelled("acme", "a")
    assert not known._by_tenant


# The feed


class ScriptedConsumer:
    """Plays the records and errors that a test puts into it."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.script: SimpleQueue[Message | Exception] = SimpleQueue()
        self.assigned: list[TopicPartition] = []
        self.asked: list[TopicPartition] = []
        self.found = TopicPartition(CONTROL_CANCELLATIONS, 0, 7)

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, _partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return 5, 9

    def offsets_for_times(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.asked = asked
        return [self.found]

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = partitions

    def poll(self, timeout: float) -> Message | None:
        try:
            played = self.script.get(timeout=min(timeout, 0.02))
        except Empty:
            return None
        if isinstance(played, Exception):
            raise played
        return played

    def close(self) -> None: ...


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> ScriptedConsumer:
    made = ScriptedConsumer()

    def make(config: dict[str, Any], _reader: str) -> ScriptedConsumer:
        made.config = config
        return made

    monkeypatch.setattr("fairlane_server.kafka.feeds.SkippingConsumer", make)
    return made


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def feed(consumer: ScriptedConsumer, known: Cancellations, told: list[tuple[str, str]]) -> Iterator[CancellationFeed]:
    feed = CancellationFeed(
        KafkaSettings(), CODEC, known, lambda tenant, request_id: told.append((tenant, request_id)), lambda: NOW_MS
    )
    yield feed
    feed.stop()


def record(value: bytes, offset: int = 7) -> Message:
    return Message(topic=CONTROL_CANCELLATIONS, partition=0, offset=offset, key=b"a", value=value)


def cancelled(request_id: str, requested_at_ms: int = NOW_MS) -> bytes:
    return CODEC.encode(Cancellation(request_id, "acme", "dispatcher-1", requested_at_ms))


def end() -> Message:
    return Message(topic=CONTROL_CANCELLATIONS, partition=0, offset=9, error=KafkaError(KafkaError._PARTITION_EOF))


def test_what_was_cancelled_before_is_known_when_it_has_started(
    consumer: ScriptedConsumer, feed: CancellationFeed, known: Cancellations, told: list[tuple[str, str]]
) -> None:
    consumer.script.put(record(cancelled("a", NOW_MS - 50)))
    consumer.script.put(end())
    feed.start(5)
    assert known.is_cancelled("acme", "a", NOW_MS - 50)
    assert not known.is_cancelled("acme", "a", NOW_MS)
    assert told == [("acme", "a")]
    assert [place.offset for place in consumer.asked] == [NOW_MS - KNOWN_FOR_MS]
    assert [place.offset for place in consumer.assigned] == [7]
    assert consumer.config["isolation.level"] == "read_committed"


def test_what_is_cancelled_later_is_told_when_it_is_known(
    consumer: ScriptedConsumer, feed: CancellationFeed, known: Cancellations, told: list[tuple[str, str]]
) -> None:
    consumer.script.put(end())
    feed.start(5)
    consumer.script.put(record(b"\x93"))
    consumer.script.put(record(CODEC.encode(TenantSpec("acme"))))
    consumer.script.put(record(cancelled("a")))
    eventually(lambda: told == [("acme", "a")], what="word of the cancellation")
    assert known.is_cancelled("acme", "a")


def test_a_cancel_with_an_unknown_schema_waits_for_the_registry(
    consumer: ScriptedConsumer, known: Cancellations, told: list[tuple[str, str]]
) -> None:
    schemas = LateSchemas(Cancellation, is_available=False)
    failures: list[Exception] = []
    feed = CancellationFeed(
        KafkaSettings(),
        Codec(schemas),
        known,
        lambda tenant, request_id: told.append((tenant, request_id)),
        lambda: NOW_MS,
    )
    feed.on_failure(failures.append)
    consumer.script.put(end())
    feed.start(5)
    consumer.script.put(record(late(cancelled("a"))))
    eventually(lambda: schemas.look_ups > 1, what="a second look-up")
    schemas.is_available = True
    eventually(lambda: told == [("acme", "a")], what="word of the cancellation")
    assert not failures
    feed.stop()


def test_a_topic_with_nothing_that_new_is_read_from_its_end(consumer: ScriptedConsumer, feed: CancellationFeed) -> None:
    consumer.found = TopicPartition(CONTROL_CANCELLATIONS, 0, -1)
    feed.start(5)
    assert [place.offset for place in consumer.assigned] == [9]


def test_a_broker_that_does_not_say_where_to_begin_is_an_error(
    consumer: ScriptedConsumer, feed: CancellationFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = SimpleNamespace(offset=-1, error=KafkaError(KafkaError._TIMED_OUT))
    monkeypatch.setattr(consumer, "offsets_for_times", lambda _asked, timeout: [refusal])  # noqa: ARG005 - as it is called
    with pytest.raises(FeedUnavailableError, match=CONTROL_CANCELLATIONS):
        feed.start(5)


def test_its_owner_hears_of_its_end(consumer: ScriptedConsumer, feed: CancellationFeed) -> None:
    failures: list[Exception] = []
    feed.on_failure(failures.append)
    consumer.script.put(end())
    feed.start(5)
    consumer.script.put(KafkaException(KafkaError(KafkaError._TRANSPORT)))
    eventually(lambda: failures, what="word of the end")
