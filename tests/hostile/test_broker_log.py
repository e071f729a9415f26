"""The tool that the tests of this folder damage a log with: what it writes is what a consumer is served."""

from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka.record.util import calc_crc32c
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.kit.broker_log import (
    GZIP,
    PartitionLog,
    Record,
    noise,
    records_filling,
)
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.broker]

BATCHES = 3
RECORDS = 4
VICTIM = RECORDS
"""The first offset of the second of the batches."""


@pytest.fixture
def written(broker: str, broker_log_dir: Path, unique: str) -> tuple[str, PartitionLog]:
    """A topic with three batches of four records, and its log."""
    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic(unique, 1, 1)])[unique].result(PATIENCE_S)
    producer = Producer({"bootstrap.servers": broker, "linger.ms": 1_000, "enable.idempotence": True})
    for batch in range(BATCHES):
        for number in range(RECORDS):
            producer.produce(unique, key=b"k", value=b"%d-%d " % (batch, number) + b"." * 100, partition=0)
        assert producer.flush(PATIENCE_S) == 0
    return unique, PartitionLog.of(broker_log_dir, unique)


def read(broker: str, topic: str, start: int = 0) -> list[tuple[int, bytes]]:
    """All records from here to the end."""
    consumer = Consumer({"bootstrap.servers": broker, "group.id": topic, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, start)])
    found: list[tuple[int, bytes]] = []
    try:
        while True:
            message = consumer.poll(PATIENCE_S)
            assert message is not None, "nothing came"
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return found
            found.append((message.offset() or 0, message.value() or b""))
    finally:
        consumer.close()


def test_batches_are_listed_with_the_checksums_they_have(written: tuple[str, PartitionLog]) -> None:
    _, log = written
    assert [(batch.base_offset, batch.record_count) for batch in log.batches()] == [(0, 4), (4, 4), (8, 4)]
    for batch in log.batches():
        assert (batch.magic, batch.attributes, batch.last_offset) == (2, 0, batch.base_offset + 3)
        whole = batch.encoded(log.body(batch))
        assert calc_crc32c(whole[21:]) == batch.crc
        assert log.file.read_bytes()[batch.position :][: batch.size] == whole


def test_a_replaced_batch_is_what_a_reader_gets(broker: str, written: tuple[str, PartitionLog]) -> None:
    topic, log = written
    assert len(read(broker, topic)) == BATCHES * RECORDS
    log.replace(log.at(VICTIM), body=records_filling(log.at(VICTIM), [Record(b"crafted")] * RECORDS))
    found = read(broker, topic)
    assert [offset for offset, _ in found] == list(range(BATCHES * RECORDS))
    assert [value for _, value in found[4:8]] == [b"crafted"] * RECORDS


def test_a_control_batch_is_passed_by_a_reader(broker: str, written: tuple[str, PartitionLog]) -> None:
    topic, log = written
    log.make_control(log.at(VICTIM))
    assert [offset for offset, _ in read(broker, topic)] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_an_emptied_batch_is_passed_by_a_reader(broker: str, written: tuple[str, PartitionLog]) -> None:
    topic, log = written
    log.make_empty(log.at(VICTIM))
    assert [offset for offset, _ in read(broker, topic)] == [0, 1, 2, 3, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "damage",
    [
        lambda log, batch: log.flip(batch),
        lambda log, batch: log.set_magic(batch, 3),
        lambda log, batch: log.replace(batch, attributes=GZIP, body=noise(batch)),
    ],
    ids=["a flipped byte", "an unknown magic", "garbage for gzip"],
)
def test_damage_is_served_as_it_is(
    broker: str, written: tuple[str, PartitionLog], damage: Callable[[PartitionLog, object], None]
) -> None:
    topic, log = written
    damage(log, log.at(VICTIM))
    consumer = Consumer({"bootstrap.servers": broker, "group.id": topic, "check.crcs": True})
    try:
        consumer.assign([TopicPartition(topic, 0, VICTIM)])
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        error = message.error()
        assert error is not None
        assert message.offset() == VICTIM
        assert error.code() in {
            KafkaError._BAD_MSG,
            KafkaError._NOT_IMPLEMENTED,
            KafkaError._BAD_COMPRESSION,
        }
    finally:
        consumer.close()
    assert [offset for offset, _ in read(broker, topic, VICTIM + RECORDS)] == [8, 9, 10, 11]
