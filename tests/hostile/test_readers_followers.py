"""Control feeds, clients, services and the gateway: what stands around a damaged batch reaches them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from fairlane import headers, metrics
from fairlane.client import Client
from fairlane.client.connector import KafkaConnector
from fairlane.client.group_member import UndecodableReply
from fairlane.client.reader import TopicReader, end_of
from fairlane.clock import now_ms
from fairlane.names import GATEWAY_REPLIES, dead_letter_replies_topic, replies_topic
from fairlane.records import InferenceReply, Output, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings, Settings
from fairlane_server.kafka.feeds import Feed
from producers.gateway.pipeline import reply_reader
from producers.gateway.pipeline.reply_reader import ReplyReader
from tests.kit.broker_log import PartitionLog
from tests.kit.damage import DAMAGES, UNREADABLE, Damage, KeyAndValue, make_topic, write_batch
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import header
from tests.kit.recorder_kit import delete_reply_topics, delete_topics, make_topics
from tests.kit.waiting import PATIENCE_S, eventually, eventually_async

pytestmark = [pytest.mark.full, pytest.mark.broker]

PER_BATCH = 3
CODEC = default_codec()
BATCHES = (0, 1, 2)
VICTIM = 1


def ids(number: int) -> list[str]:
    """Of the replies in a batch."""
    return [f"r{number}-{index}" for index in range(PER_BATCH)]


def replies(number: int) -> list[KeyAndValue]:
    return [
        (one.encode(), CODEC.encode(InferenceReply(one, "t", "ok", output=Output(text=one)))) for one in ids(number)
    ]


def surviving(damage: Damage) -> list[str]:
    return [one for number in BATCHES for one in (ids(number)[damage.survivors] if number == VICTIM else ids(number))]


def write_damaged(
    broker: str,
    log_dir: Path,
    topic: str,
    damage: Damage,
    batch: Callable[[int], list[KeyAndValue]] = replies,
    partition: int = 0,
) -> int:
    """Write the batches and damage the one in the middle. Returns its first offset."""
    starts = [write_batch(broker, topic, batch(number), partition) for number in BATCHES]
    log = PartitionLog.of(log_dir, topic, partition)
    damage.apply(log, log.at(starts[VICTIM]), batch(VICTIM))
    return starts[VICTIM]


def counted(reader: str, damage: Damage) -> float:
    return float(metrics.UNREADABLE_RECORDS.labels(reader=reader, problem=damage.problem or "none")._value.get())


def expected_count(damage: Damage) -> int:
    return PER_BATCH if damage.problem else 0


@pytest.fixture
def settings(broker: str) -> KafkaSettings:
    return KafkaSettings(kafka_bootstrap_servers=broker)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_control_feed_knows_what_stands_around_it(
    broker: str, broker_log_dir: Path, unique: str, settings: KafkaSettings, damage: Damage
) -> None:
    def tenants(number: int) -> list[KeyAndValue]:
        return [(one.encode(), CODEC.encode(TenantSpec(one))) for one in ids(number)]

    make_topic(broker, unique)
    write_damaged(broker, broker_log_dir, unique, damage, tenants)
    before = counted("feed", damage)
    feed = Feed(settings, CODEC, unique, TenantSpec)
    try:
        feed.start()
        assert sorted(feed.snapshot) == sorted(surviving(damage))
        write_batch(broker, unique, [(b"later", CODEC.encode(TenantSpec("later")))])
        eventually(lambda: "later" in feed.snapshot, what="what comes later")
    finally:
        feed.stop()
    assert counted("feed", damage) == before + expected_count(damage)


def test_a_feed_counts_a_record_that_is_none(broker: str, unique: str, settings: KafkaSettings) -> None:
    make_topic(broker, unique)
    write_batch(broker, unique, [(b"bad", b"\xff\xff"), (b"good", CODEC.encode(TenantSpec("good")))])
    problem = metrics.UNREADABLE_RECORDS.labels(reader="feed", problem="bad_magic")._value
    before = problem.get()
    feed = Feed(settings, CODEC, unique, TenantSpec)
    try:
        feed.start()
        assert list(feed.snapshot) == ["good"]
    finally:
        feed.stop()
    assert problem.get() == before + 1


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_client_gets_the_replies_around_it(
    broker: str, broker_log_dir: Path, unique: str, settings: KafkaSettings, damage: Damage
) -> None:
    make_topic(broker, unique)
    came: list[str] = []
    reader = TopicReader(
        KafkaConnector(settings).reader(unique),
        unique,
        InferenceReply,
        CODEC,
        lambda _: True,
        lambda reply, _: came.append(reply.request_id),
        now_ms,
    )
    before = counted("client_replies", damage)
    try:
        reader.seek_to_end(20)
        # A partition that was added since is read from its beginning, and not fetched before the reader runs.
        admin = AdminClient({"bootstrap.servers": broker})
        admin.create_partitions([NewPartitions(unique, 2)])[unique].result(PATIENCE_S)
        write_damaged(broker, broker_log_dir, unique, damage, partition=1)
        stopping = threading.Event()
        thread = threading.Thread(target=reader.run, args=(stopping,))
        thread.start()
        try:
            eventually(lambda: came[-PER_BATCH:] == ids(BATCHES[-1]), what="the replies behind it")
        finally:
            stopping.set()
            thread.join()
    finally:
        reader.close()
    assert came == surviving(damage)
    assert counted("client_replies", damage) == before + expected_count(damage)


@pytest.fixture
def client(broker: str, unique: str) -> Iterator[Client]:
    """Of a tenant with a service."""
    make_topics(broker, TenantSpec(unique, services=("billing",)))
    make_topic(broker, dead_letter_replies_topic(unique))
    with Client(tenant=unique, bootstrap_servers=broker) as client:
        yield client
    # A recorder of another test would read them too.
    delete_reply_topics(broker, unique)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_stream_of_replies_reports_it_and_commits_behind_it(
    broker: str, broker_log_dir: Path, client: Client, damage: Damage
) -> None:
    topic = replies_topic(client.tenant, "billing")
    first = write_damaged(broker, broker_log_dir, topic, damage)
    reported: list[UndecodableReply] = []
    with client.replies("g", service="billing", on_error=reported.append, idle_timeout_ms=15_000) as stream:
        assert [next(stream).request_id for _ in surviving(damage)] == surviving(damage)
        stream.ack()
    assert [(bad.offset, bad.value, bad.problem) for bad in reported] == (
        [(first, None, damage.problem)] if damage.problem else []
    )
    write_batch(broker, topic, replies(3))
    with client.replies("g", service="billing", on_error=reported.append, idle_timeout_ms=15_000) as stream:
        assert [next(stream).request_id for _ in ids(3)] == ids(3)
    assert len(reported) == (1 if damage.problem else 0)


def test_a_service_keeps_a_dead_letter_of_it(
    broker: str, broker_log_dir: Path, client: Client, settings: KafkaSettings
) -> None:
    damage = UNREADABLE[0]
    topic = replies_topic(client.tenant, "billing")
    first = write_damaged(broker, broker_log_dir, topic, damage)
    handled: list[str] = []
    service = client.serve_replies(
        "g", lambda reply: handled.append(reply.request_id), service="billing", idle_timeout_ms=3_000
    )
    service.run()
    assert handled == surviving(damage)
    letters = LogReader(settings, [dead_letter_replies_topic(client.tenant)])
    try:
        letters.read_to_end()
    finally:
        letters.close()
    (letter,) = letters.records
    assert header(letter, headers.DLT_ORIGINAL_TOPIC) == topic
    assert header(letter, headers.DLT_ORIGINAL_OFFSET) == str(first)
    assert f"offsets {first} to {first + PER_BATCH - 1}" in header(letter, headers.DLT_EXCEPTION_MESSAGE)


class Sink:
    """Told of partitions and replies in the event loop; the replies are looked at on the reader's thread."""

    def owned(self, partitions: frozenset[int], partition_count: int) -> None: ...

    def lost(self, partitions: frozenset[int]) -> None: ...

    def settle(self, replies: list[InferenceReply]) -> None: ...


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_gateway_reads_the_replies_around_it(
    broker: str,
    broker_log_dir: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    damage: Damage,
) -> None:
    make_topics(broker)
    request.addfinalizer(partial(delete_topics, broker, GATEWAY_REPLIES))
    victim = write_damaged(broker, broker_log_dir, GATEWAY_REPLIES, damage)
    # It begins at the end, where nothing can be damaged before it is fetched.
    monkeypatch.setattr(
        reply_reader,
        "end_of",
        lambda consumer, topic, partition, deadline: (
            end_of(consumer, topic, partition, deadline) if partition else victim - PER_BATCH
        ),
    )
    came: list[str] = []
    failures: list[BaseException] = []
    before = counted("gateway_replies", damage)

    async def read() -> None:
        settings = Settings(kafka_bootstrap_servers=broker, group_prefix=unique)
        reader = ReplyReader(
            settings,
            CODEC,
            Sink(),  # type: ignore[arg-type]  # a double
            lambda found: came.extend(one.request_id for one in found),
            failures.append,
        )
        reader.start()
        try:
            await eventually_async(lambda: came[-PER_BATCH:] == ids(BATCHES[-1]), what="the replies behind it")
        finally:
            await reader.close()

    asyncio.run(read())
    assert failures == []
    assert came == surviving(damage)
    assert counted("gateway_replies", damage) == before + expected_count(damage)
