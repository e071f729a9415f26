"""One member of a pool's group on the real broker: what librdkafka remembers over a reassignment."""

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.kafka_config import connection, idempotent_producer
from fairlane.names import priority_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Ownership
from fairlane.settings import Settings
from inference_consumers.group import PoolMember
from tests.kit.waiting import eventually


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


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_what_goes_to_another_before_it_was_begun_is_read_there_alone(
    settings: Settings, topic: str, unique: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_protocol = settings.model_copy(update={"consumer_group_protocol": protocol})
    ownership, taken_over = Ownership(), Ownership()
    revoked: list[None] = []
    member = PoolMember(of_protocol, unique, ownership, lambda: revoked.append(None))
    other = PoolMember(of_protocol, unique, taken_over, lambda: None)
    delivered: list[tuple[int, bool]] = []

    def both_delivered() -> bool:
        for one in (member, other):
            delivered.extend((claim.partition.partition, one is member) for claim, _ in one.poll(0.1))
        return len(delivered) >= 2

    try:
        with monkeypatch.context() as patched:
            # As in one long poll, in which a second member comes.
            patched.setattr(member, "_take_up", lambda: None)
            member.join()
            eventually(lambda: (member.poll(0.05), member._assigned)[1], timeout_s=20)
            other.join()
            eventually(lambda: (member.poll(0.05), other.poll(0.05), revoked and len(taken_over.partitions()) == 3)[2])
            assert ownership.partitions() == ()
        _publish(settings, topic)
        eventually(both_delivered, timeout_s=30)
        assert sorted(number for number, _ in delivered) == [0, 1]
        assert {is_member for _, is_member in delivered} == {True, False}
        assert set(ownership.partitions()).isdisjoint(taken_over.partitions())
    finally:
        member.close()
        other.close()


def _publish(settings: Settings, topic: str) -> None:
    producer = Producer(idempotent_producer(settings))
    for partition in (0, 1):
        producer.produce(topic, value=b"work", key=b"key", partition=partition)
    assert producer.flush(10) == 0
