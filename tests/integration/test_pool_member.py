"""One member of a pool's group on the real broker: what librdkafka remembers over a reassignment."""

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.kafka import connection, idempotent_producer
from fairlane.names import priority_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Ownership
from fairlane.settings import Settings
from inference_consumers.group import PoolMember
from tests.waiting import eventually


@pytest.fixture
def settings(broker: str, unique: str) -> Settings:
    return Settings(kafka_bootstrap_servers=broker, group_prefix=unique, instance_id=unique)


@pytest.fixture
def topic(settings: Settings, unique: str) -> str:
    topics = [NewTopic(priority_topic(unique, priority), 2, 1) for priority in Priority]
    admin = AdminClient(connection(settings))
    for created in admin.create_topics(topics).values():
        created.result(10)
    return priority_topic(unique, Priority.NORMAL)


def test_a_partition_paused_when_it_was_lost_is_read_again(settings: Settings, topic: str, unique: str) -> None:
    ownership = Ownership()
    member, other = (PoolMember(settings, unique, owned, lambda: None) for owned in (ownership, Ownership()))

    def owned_of_topic() -> int:
        return sum(partition.topic == topic for partition in ownership.partitions())

    try:
        member.join()
        eventually(lambda: (member.poll(0.1), owned_of_topic() == 2)[1], timeout_s=20)
        member.pause_priorities([Priority.NORMAL])
        _publish(settings, topic)

        # One partition goes and comes back, as when a second member joins and leaves.
        other.join()
        eventually(lambda: (member.poll(0.05), other.poll(0.05), owned_of_topic() == 1)[2], timeout_s=20)
        member.pause_priorities([])
        other.close()

        delivered: set[int] = set()

        def both_delivered() -> bool:
            delivered.update(claim.partition.partition for claim, _ in member.poll(0.1))
            return delivered == {0, 1}

        eventually(both_delivered, timeout_s=30)
    finally:
        member.close()


def _publish(settings: Settings, topic: str) -> None:
    producer = Producer(idempotent_producer(settings))
    for partition in (0, 1):
        producer.produce(topic, value=b"work", key=b"key", partition=partition)
    assert producer.flush(10) == 0
