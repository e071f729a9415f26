"""A member of a pool's group: when it begins to read what it was assigned, and where."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane.names import priority_topic
from fairlane.offsets import CommitPoint
from fairlane.outcomes import Priority
from fairlane.ownership import Ownership, PartitionId
from fairlane.settings import Settings
from inference_consumers import group
from inference_consumers.group import PoolMember

TOPIC = priority_topic("p", Priority.NORMAL)
P0, P1 = PartitionId(TOPIC, 0), PartitionId(TOPIC, 1)
COMMITTED = {P0: CommitPoint(10, 0b10), P1: CommitPoint(20)}


class FakeConsumer:
    """What a poll serves is pushed: callbacks of the group, and records. In a callback nobody may wait for a broker."""

    def __init__(self) -> None:
        self.events: deque[object] = deque()
        self.callbacks: dict[str, Callable[..., None]] = {}
        self.is_in_callback = False
        self.read: dict[PartitionId, int] = {}
        """Where reading began."""
        self.paused: set[PartitionId] = set()
        self.generation = 3
        self.meanwhile: Callable[[], None] = lambda: None
        """Done while the broker is asked for offsets."""

    def rebalance(self, callback: str, *partitions: PartitionId) -> None:
        self.events.append((callback, partitions))

    def record(self, partition: PartitionId, offset: int, error: KafkaError | None = None) -> None:
        self.events.append(
            SimpleNamespace(
                topic=lambda: partition.topic,
                partition=lambda: partition.partition,
                offset=lambda: offset,
                error=lambda: error,
            )
        )

    def subscribe(self, _topics: list[str], **callbacks: Callable[..., None]) -> None:
        self.callbacks = callbacks

    def poll(self, _timeout: float) -> Any:
        while self.events:
            event = self.events.popleft()
            if not isinstance(event, tuple):
                return event
            callback, partitions = event
            self.is_in_callback = True
            self.callbacks[callback](self, [TopicPartition(*partition) for partition in partitions])
            self.is_in_callback = False
        return None

    def consume(self, _most: int, _timeout: float) -> list[Any]:
        found = []
        while (message := self.poll(0)) is not None:
            found.append(message)
        return found

    def poll_batch(self, most: int, timeout: float) -> list[Any]:
        first = self.poll(timeout)
        return [] if first is None else [first, *self.consume(most, 0)]

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        assert not self.is_in_callback
        self.meanwhile()
        points = [COMMITTED[PartitionId(wanted.topic, wanted.partition)] for wanted in partitions]
        return [
            TopicPartition(wanted.topic, wanted.partition, point.offset, point.metadata)
            for wanted, point in zip(partitions, points, strict=True)
        ]

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        assert not self.is_in_callback
        return 0, 100

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self.generation.to_bytes(4, "little", signed=True) + b"group\0me\0\0"

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.read |= {PartitionId(start.topic, start.partition): start.offset for start in partitions}

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        for gone in partitions:
            del self.read[PartitionId(gone.topic, gone.partition)]  # librdkafka refuses what was not assigned, too

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.read.clear()
        self.incremental_assign(partitions)

    def unassign(self) -> None:
        self.read.clear()

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.paused |= {PartitionId(one.topic, one.partition) for one in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.paused -= {PartitionId(one.topic, one.partition) for one in partitions}


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> FakeConsumer:
    made = FakeConsumer()
    monkeypatch.setattr(group, "SkippingConsumer", lambda _config, _reader: made)
    monkeypatch.setattr(group, "TopicIds", lambda _settings: lambda _topics, _timeout_s: {})
    return made


@pytest.fixture
def ownership() -> Ownership:
    return Ownership()


@pytest.fixture(params=["consumer", "classic"])
def member(request: pytest.FixtureRequest, consumer: FakeConsumer, ownership: Ownership) -> PoolMember:
    made = PoolMember(Settings(consumer_group_protocol=request.param), "p", ownership, lambda: None)
    made.join()
    return made


def offsets(member: PoolMember) -> list[tuple[int, int]]:
    """Of what a poll hands on."""
    return [(claim.partition.partition, claim.offset) for claim, _ in member.poll(0)]


def test_it_reads_from_where_the_group_left_off_and_hands_on_what_is_not_done(
    member: PoolMember, consumer: FakeConsumer, ownership: Ownership
) -> None:
    consumer.rebalance("on_assign", P0, P1)
    assert offsets(member) == []
    assert (consumer.read, ownership.partitions()) == ({}, ())
    for offset in (10, 11, 12):
        consumer.record(P0, offset)
    assert offsets(member) == [(0, 10), (0, 12)], "11 was done by another, as the committed metadata says"
    assert consumer.read == {P0: 10, P1: 20}
    assert ownership.membership is not None
    assert ownership.membership.generation == 3


def test_what_is_taken_away_before_it_was_begun_is_not_read(
    member: PoolMember, consumer: FakeConsumer, ownership: Ownership
) -> None:
    consumer.rebalance("on_assign", P0)
    consumer.rebalance("on_revoke", P0)
    member.poll(0)
    member.poll(0)
    assert (consumer.read, ownership.partitions()) == ({}, ())
    assert ownership.membership is not None, "a member without partitions is one"


def test_what_comes_back_in_the_same_poll_is_read_from_its_committed_offset(
    member: PoolMember, consumer: FakeConsumer, ownership: Ownership
) -> None:
    consumer.rebalance("on_assign", P0)
    member.poll(0)
    consumer.record(P0, 10)
    assert offsets(member) == [(0, 10)]
    # Fetched by the assignment that ends, and handed over together with the one that begins.
    consumer.record(P0, 40)
    consumer.rebalance("on_revoke", P0)
    consumer.rebalance("on_assign", P0)
    consumer.record(P0, 41, KafkaError(KafkaError._PARTITION_EOF))
    assert offsets(member) == []
    consumer.record(P0, 10)
    assert offsets(member) == [(0, 10)]
    assert consumer.read == {P0: 10}
    assert ownership.resume_points() == {P0: 10}


def test_a_full_priority_stays_paused_in_what_comes(member: PoolMember, consumer: FakeConsumer) -> None:
    member.pause_priorities([str(Priority.NORMAL)])
    consumer.rebalance("on_assign", P0)
    member.poll(0)
    member.poll(0)
    assert consumer.paused == {P0}


def test_a_member_that_the_group_lost_meanwhile_begins_nothing(
    member: PoolMember, consumer: FakeConsumer, ownership: Ownership
) -> None:
    def lose() -> None:
        consumer.generation = -1
        consumer.rebalance("on_lost", P0)

    consumer.meanwhile = lose
    consumer.rebalance("on_assign", P0)
    member.poll(0)
    member.poll(0)
    assert (consumer.read, ownership.partitions(), ownership.membership) == ({}, (), None)
    consumer.generation, consumer.meanwhile = 4, lambda: None
    consumer.rebalance("on_assign", P0)
    member.poll(0)
    member.poll(0)
    assert (consumer.read, ownership.partitions()) == ({P0: 10}, (P0,))


def test_a_group_that_does_not_say_where_it_left_off_ends_the_member(
    member: PoolMember, consumer: FakeConsumer, ownership: Ownership
) -> None:
    def refuse() -> None:
        raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))

    consumer.meanwhile = refuse
    consumer.rebalance("on_assign", P0)
    member.poll(0)
    with pytest.raises(KafkaException):
        member.poll(0)
    assert (consumer.read, ownership.partitions()) == ({}, ())
