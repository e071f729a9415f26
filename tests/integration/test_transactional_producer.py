"""One transaction after another on a real broker: what a refused one leaves behind for the next."""

import gc
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.kafka_config import connection, read_committed_consumer
from fairlane.kafka_config import transactional_producer as transactional
from fairlane.offsets import CommitPoint
from fairlane.ownership import CommitPlan, Membership, PartitionId
from fairlane.settings import Settings
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
)
from fairlane_server.processes.watchdog import Watchdog
from tests.kit.log_reader import LogReader

pytestmark = pytest.mark.broker

RECORDS = 400
RECORD_BYTES = 2_000


class Log:
    """A topic that takes records, one that goes away, and a group whose member has left."""

    def __init__(self, broker: str, unique: str) -> None:
        self.settings = Settings(kafka_bootstrap_servers=broker, group_prefix=unique)
        self.group, self.topic, self.other = f"{unique}-group", f"{unique}-stays", f"{unique}-goes"
        self.admin = AdminClient(connection(self.settings))
        topics = [NewTopic(self.topic, 4, 1), NewTopic(self.other, 1, 1)]
        for created in self.admin.create_topics(topics).values():
            created.result(20)
        self.hung: list[str] = []
        self.watchdog = Watchdog(30.0, self.hung.append)
        self.watchdog.start()
        self.start()

    def start(self) -> None:
        """A new process that takes the place of the last."""
        producer = Producer(transactional(self.settings, self.group, 20_000))
        producer.init_transactions(20)
        self.producer = TransactionalProducer(producer, self.watchdog)

    def records(self, topic: str, number: str) -> list[OutputRecord]:
        """Those of one transaction, spread over the partitions."""
        filler = b"." * RECORD_BYTES
        return [OutputRecord(topic, str(at).encode(), f"{number}-{at} ".encode() + filler) for at in range(RECORDS)]

    def expected(self, *numbers: str) -> list[str]:
        return sorted(f"{number}-{at}" for number in numbers for at in range(RECORDS))

    def values(self) -> list[str]:
        """What a ``read_committed`` reader finds in the topic that stays, sorted."""
        reader = LogReader(self.settings, [self.topic])
        try:
            reader.read_to_end()
            return sorted((record.value() or b"").split()[0].decode() for record in reader.records)
        finally:
            reader.close()

    def plan_of_a_member_that_left(self) -> CommitPlan:
        """The broker refuses its offsets, as those of a member that missed a rebalance."""
        consumer = Consumer(read_committed_consumer(self.settings, self.group))
        joined: list[object] = []
        consumer.subscribe([self.topic], on_assign=lambda _consumer, partitions: joined.extend(partitions))
        while not joined:
            consumer.poll(0.1)
        membership = Membership(1, consumer.memberid(), consumer.consumer_group_metadata())
        consumer.close()
        return CommitPlan(membership, (), {PartitionId(self.topic, 0): CommitPoint(1)})


@pytest.fixture
def log(broker: str, unique: str) -> Iterator[Log]:
    made = Log(broker, unique)
    yield made
    made.watchdog.stop()
    assert made.hung == []
    # A producer lives until it is collected, and would miss its broker aloud.
    del made.producer
    gc.collect()


def test_what_follows_refused_offsets_is_committed_at_once(log: Log) -> None:
    """Its records were on their way: none of them may be missed in the sequences of their partitions."""
    plan = log.plan_of_a_member_that_left()
    log.producer.commit(log.records(log.topic, "first"), None)
    for _ in range(5):
        with pytest.raises(RefusedTransactionError, match="UNKNOWN_MEMBER_ID") as refused:
            log.producer.commit(log.records(log.topic, "refused"), plan)
        assert not refused.value.topics
        log.producer.commit(log.records(log.topic, "next")[:1], None)
    log.producer.commit(log.records(log.topic, "last"), None)
    assert log.values() == sorted([*log.expected("first", "last"), *["next-0"] * 5])


def test_a_topic_that_is_deleted_while_in_use_costs_a_restart_at_most(log: Log) -> None:
    log.producer.commit([*log.records(log.topic, "first"), *log.records(log.other, "first")], None)
    log.admin.delete_topics([log.other])[log.other].result(20)
    with pytest.raises((RefusedTransactionError, FatalTransactionError)):
        log.producer.commit([*log.records(log.other, "second"), *log.records(log.topic, "second")], None)
    log.start()
    with pytest.raises(RefusedTransactionError) as refused:
        log.producer.commit([*log.records(log.other, "third"), *log.records(log.topic, "third")], None)
    assert set(refused.value.topics) == {log.other}
    log.producer.commit(log.records(log.topic, "fourth"), None)
    assert log.values() == log.expected("first", "fourth")
