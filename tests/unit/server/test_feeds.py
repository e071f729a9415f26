"""Following a compacted topic, over a consumer that plays a script."""

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from fairlane.backoff import Backoff
from fairlane.codec import Codec
from fairlane.records import ModelVersion, TenantSpec
from fairlane.schema_files import committed_schemas, default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.feeds import Feed, FeedUnavailableError
from tests.kit.waiting import eventually

TOPIC = "control.tenants"
CODEC = default_codec()


class ScriptedConsumer:
    """Plays the records and errors that a test puts into it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.script: SimpleQueue[Message | Exception] = SimpleQueue()
        self.assigned: list[TopicPartition] = []
        self.topic_error: KafkaError | None = None
        self.bounds = (5, 9)
        self.closed = False

    def list_topics(self, topic: str, timeout: float) -> Any:
        partitions = {} if self.topic_error is not None else {0: None}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=self.topic_error, partitions=partitions)})

    def get_watermark_offsets(self, _partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return self.bounds

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

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> ScriptedConsumer:
    made = ScriptedConsumer({})

    def make(config: dict[str, Any], _reader: str) -> ScriptedConsumer:
        made.config = config
        return made

    monkeypatch.setattr("fairlane_server.kafka.feeds.SkippingConsumer", make)
    return made


@pytest.fixture
def feed(consumer: ScriptedConsumer) -> Iterator[Feed[TenantSpec]]:
    feed = Feed(KafkaSettings(), CODEC, TOPIC, TenantSpec)
    yield feed
    feed.stop()
    assert consumer.closed


class AwayFor(Codec):
    """Its schemas are out of reach for so many records."""

    def __init__(self, records: int) -> None:
        super().__init__(committed_schemas())
        self.records = records

    def decode_any(self, record_types: Any, data: bytes | None, *, may_ask: bool = True) -> Any:
        if self.records:
            self.records -= 1
            raise RegistryError("no answer")
        return super().decode_any(record_types, data, may_ask=may_ask)


def record(key: str, value: bytes | None, offset: int = 5) -> Message:
    return Message(topic=TOPIC, partition=0, offset=offset, key=key.encode(), value=value)


def tenant(name: str, weight: float = 1.0) -> Message:
    return record(name, CODEC.encode(TenantSpec(name, weight=weight)))


def end() -> Message:
    return Message(topic=TOPIC, partition=0, offset=9, error=KafkaError(KafkaError._PARTITION_EOF))


def failure(code: int, *, fatal: bool = False) -> Message:
    return Message(topic=TOPIC, partition=0, error=KafkaError(code, "says the broker", fatal))


def play(consumer: ScriptedConsumer, *messages: Message | Exception) -> None:
    for message in messages:
        consumer.script.put(message)


def test_it_has_read_everything_when_it_has_started(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    seen: list[set[str]] = []
    feed.on_change(lambda content: seen.append(set(content)))
    play(consumer, tenant("acme"), tenant("globex"), tenant("acme", 2.0), record("globex", None), end())
    feed.start(5)
    assert feed.snapshot == {"acme": TenantSpec("acme", weight=2.0)}
    assert seen == [{"acme"}]  # nothing half read was shown
    assert (consumer.assigned[0].topic, consumer.assigned[0].offset) == (TOPIC, 5)
    assert consumer.config["isolation.level"] == "read_committed"
    assert consumer.config["enable.auto.commit"] is False


def test_a_change_makes_a_new_snapshot(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    play(consumer, tenant("acme"), end())
    feed.start(5)
    before = feed.snapshot
    play(consumer, tenant("globex"))
    eventually(lambda: set(feed.snapshot) == {"acme", "globex"})
    play(consumer, record("acme", None))
    eventually(lambda: set(feed.snapshot) == {"globex"})
    assert set(before) == {"acme"}


def test_an_empty_topic_is_an_empty_snapshot(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    play(consumer, end())
    feed.start(5)
    assert feed.snapshot == {}


def test_a_topic_without_a_log_needs_no_reading(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    consumer.bounds = (7, 7)
    feed.start(5)
    assert feed.snapshot == {}
    play(consumer, record("acme", CODEC.encode(TenantSpec("acme")), 7))
    eventually(lambda: set(feed.snapshot) == {"acme"})


@pytest.mark.parametrize("last", [8, 12])
def test_the_end_is_where_it_was_at_the_start(consumer: ScriptedConsumer, feed: Feed[TenantSpec], last: int) -> None:
    """Of a log in which something is always written nobody is told the end."""
    seen: list[set[str]] = []
    feed.on_change(lambda content: seen.append(set(content)))
    play(consumer, tenant("acme"), record("globex", CODEC.encode(TenantSpec("globex")), last))
    feed.start(5)
    assert seen == [{"acme", "globex"}]


@pytest.mark.parametrize(
    "bad", [b"\x93", b"", CODEC.encode(ModelVersion("m", "1", "p", "e", ("embed",), "m", 1, 0))], ids=str
)
def test_a_record_that_cannot_be_read_changes_nothing(
    consumer: ScriptedConsumer, feed: Feed[TenantSpec], bad: bytes
) -> None:
    play(consumer, tenant("acme"), record("acme", bad), tenant("globex"), end())
    feed.start(5)
    assert set(feed.snapshot) == {"acme", "globex"}


def test_passing_errors_are_lived_through(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    play(consumer, failure(KafkaError._ALL_BROKERS_DOWN), tenant("acme"), failure(KafkaError._TRANSPORT), end())
    feed.start(5)
    assert set(feed.snapshot) == {"acme"}


@pytest.mark.parametrize(
    "event", [failure(KafkaError._FATAL, fatal=True), KafkaException(KafkaError(KafkaError._TIMED_OUT))]
)
def test_what_stops_it_later_is_told(
    consumer: ScriptedConsumer, feed: Feed[TenantSpec], event: Message | Exception
) -> None:
    told: list[Exception] = []
    feed.on_failure(told.append)
    play(consumer, tenant("acme"), end())
    feed.start(5)
    play(consumer, event)
    eventually(lambda: told)
    assert isinstance(told[0], KafkaException)
    assert set(feed.snapshot) == {"acme"}


def test_what_stops_it_at_once_is_raised(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    told: list[Exception] = []
    feed.on_failure(told.append)
    play(consumer, KafkaException(KafkaError(KafkaError._TRANSPORT)))
    with pytest.raises(FeedUnavailableError, match=TOPIC):
        feed.start(5)
    assert not told


def test_a_topic_that_is_not_read_to_its_end_is_an_error(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    play(consumer, tenant("acme"))
    with pytest.raises(FeedUnavailableError, match=r"not read to its end within 0\.1 s"):
        feed.start(0.1)


def test_a_missing_topic_is_an_error(consumer: ScriptedConsumer, feed: Feed[TenantSpec]) -> None:
    consumer.topic_error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    with pytest.raises(FeedUnavailableError, match=TOPIC):
        feed.start(0.1)


def test_records_wait_for_a_schema_registry_that_is_away(
    consumer: ScriptedConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane_server.kafka.feeds._SCHEMA_AGAIN", Backoff(first_s=0.01, longest_s=0.01))
    codec = AwayFor(3)
    feed = Feed(KafkaSettings(), codec, TOPIC, TenantSpec)
    consumer.bounds = (5, 7)
    consumer.script.put(tenant("acme", 1.0))
    consumer.script.put(record("acme", CODEC.encode(TenantSpec("acme", weight=2.0)), offset=6))
    feed.start()
    try:
        assert feed.snapshot == {"acme": TenantSpec("acme", weight=2.0)}
        assert not codec.records
    finally:
        feed.stop()
