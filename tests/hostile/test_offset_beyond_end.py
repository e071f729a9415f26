"""Committed offsets that are not in the log: the end was cut off, or the topic was deleted and created again.

A log cannot be made to lose its end on one broker. What a reader sees then is a committed offset beyond the end, and
that is committed here.
"""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic
from prometheus_client import REGISTRY

from fairlane.client.group_member import GroupMember
from fairlane.committed import TopicIds
from fairlane.kafka_config import read_committed_consumer
from fairlane.names import replies_topic
from fairlane.offsets import CommitPoint
from fairlane.records import TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from tests.kit import recorder_kit
from tests.kit.pool_reader import Pool
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]


@pytest.fixture
def pool(broker: str, unique: str) -> Iterator[Pool]:
    made = Pool(broker, unique)
    yield made
    for worker in made.workers:
        worker.crash()


def alarms(topic: str, finding: str) -> float:
    labels = {"topic": topic, "finding": finding}
    return REGISTRY.get_sample_value("fairlane_log_replaced_total", labels) or 0.0


def commit(pool: Pool, offset: int, metadata: str) -> None:
    consumer = Consumer(read_committed_consumer(pool.settings, pool.group))
    consumer.commit(offsets=[TopicPartition(*pool.partition, offset, metadata=metadata)], asynchronous=False)
    consumer.close()


def committed(pool: Pool) -> CommitPoint:
    consumer = Consumer(read_committed_consumer(pool.settings, pool.group))
    (found,) = consumer.committed([TopicPartition(*pool.partition)], timeout=10)
    consumer.close()
    return CommitPoint.parse(found.offset, found.metadata)


def recreate(pool: Pool) -> None:
    for deleted in pool.admin.delete_topics([pool.work], operation_timeout=20).values():
        deleted.result(20)

    # The broker may still be deleting it when it has answered.
    eventually(lambda: pool.work not in pool.admin.list_topics(timeout=10).topics, what="the end of the topic")
    pool.admin.create_topics([NewTopic(pool.work, 1, 1)])[pool.work].result(20)
    # Nor does every request see a new topic at once.
    eventually(lambda: TopicIds(pool.settings)([pool.work], 5.0), what="the topic")


def test_the_topic_id_is_committed_and_another_topic_of_the_name_has_another(pool: Pool) -> None:
    pool.write("a", "b")
    worker = pool.worker()
    pool.until(lambda: len(worker.values) == 2, "both records")
    worker.settle(pool.partition, [0, 1])
    topic_id = TopicIds(pool.settings)([pool.work], 5.0)[pool.work]
    assert committed(pool) == CommitPoint(2, 0, topic_id)
    pool.crash(worker)
    recreate(pool)
    assert TopicIds(pool.settings)([pool.work], 5.0)[pool.work] != topic_id


@pytest.mark.parametrize("has_id", [False, True])
def test_a_log_that_lost_its_end_is_read_on_at_its_end(pool: Pool, has_id: bool) -> None:
    pool.write(*(f"old {number}" for number in range(20)))
    topic_id = TopicIds(pool.settings)([pool.work], 5.0)[pool.work] if has_id else ""
    commit(pool, 1_000, CommitPoint(1_000, 0b1010, topic_id).metadata)
    before = alarms(pool.work, "cut")
    first = pool.worker()
    pool.until(first.ownership.partitions, "the partitions")
    assert alarms(pool.work, "cut") == before + 1
    # Before any work is done, so that a crash does not skip what comes meanwhile.
    pool.write("new")
    pool.until(lambda: first.values, "what came after")
    first.loop.commit_positions()
    eventually(lambda: committed(pool).offset == 20, what="the commit of the new position")
    pool.crash(first)
    second = pool.worker()
    pool.until(lambda: second.values, "what came after")
    assert second.values == [b"new"]
    second.settle(pool.partition, [20])
    assert pool.outputs() == pool.expected([20])
    assert alarms(pool.work, "cut") == before + 1


@pytest.mark.parametrize("records", [1, 5])
def test_a_topic_created_again_is_read_from_its_beginning(pool: Pool, records: int) -> None:
    pool.write("a", "b", "c")
    worker = pool.worker()
    pool.until(lambda: len(worker.values) == 3, "the records")
    worker.settle(pool.partition, [0, 1, 2])
    stale = committed(pool)
    pool.crash(worker)
    recreate(pool)
    # The broker forgets commits together with their topic, but for one that comes late.
    pool.write(*(f"new {number}" for number in range(records)))
    commit(pool, stale.offset, stale.metadata)
    before = alarms(pool.work, "recreated")
    successor = pool.worker()
    pool.until(lambda: len(successor.values) == records, "all that is in the new topic")
    assert successor.values == [f"new {number}".encode() for number in range(records)]
    assert alarms(pool.work, "recreated") == before + 1


def committed_by(consumer: Consumer, topic: str) -> int:
    return int(consumer.committed([TopicPartition(topic, 0)], timeout=10)[0].offset)


def test_a_reply_service_reads_on_at_the_end_too(broker: str, unique: str) -> None:
    tenant = TenantSpec(unique)
    recorder_kit.make_topics(broker, tenant)
    topic, settings = replies_topic(unique), KafkaSettings(kafka_bootstrap_servers=broker)
    writer = recorder_kit.LogWriter(broker, unique)
    writer.write(topic, [recorder_kit.reply_to(unique, number) for number in range(5)])
    consumer = Consumer(read_committed_consumer(settings, unique))
    consumer.commit(offsets=[TopicPartition(topic, 0, 1_000)], asynchronous=False)
    member = GroupMember(
        consumer,
        topic,
        default_codec(),
        from_beginning=True,
        on_undecodable=None,
        idle_timeout_s=1.0,
        start_timeout_s=10.0,
        topic_ids=TopicIds(settings),
    )
    try:
        eventually(lambda: member.next() is None and committed_by(consumer, topic) == 6, what="the new position")
        writer.write(topic, [recorder_kit.reply_to(unique, 5)])
        found: list[str] = []

        def is_found() -> bool:
            reply = member.next()
            found.extend([] if reply is None else [reply.request_id])
            return bool(found)

        eventually(is_found, what="the reply")
        assert found == [f"{unique}-5"]
    finally:
        member.close()
        recorder_kit.delete_reply_topics(broker, unique)
