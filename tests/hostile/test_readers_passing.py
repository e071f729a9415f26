"""A consumer that goes on behind what cannot be read, on the broker's own files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from fairlane import metrics
from fairlane.kafka_config import ClientConfig, read_committed_consumer
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import BAD_HEADERS, SkippedRange, SkippingConsumer, message_headers
from tests.kit.broker_log import PartitionLog
from tests.kit.damage import DAMAGES, UNREADABLE, Damage, KeyAndValue, make_topic, write_batch
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

PER_BATCH = 3
READER = "test"


@pytest.fixture
def config(broker: str, unique: str) -> ClientConfig:
    return read_committed_consumer(KafkaSettings(kafka_bootstrap_servers=broker), unique) | {
        "enable.partition.eof": True
    }


@pytest.fixture
def consumer(config: ClientConfig) -> Iterator[SkippingConsumer]:
    made = SkippingConsumer(config, READER)
    yield made
    made.close()


def records(number: int) -> list[KeyAndValue]:
    """Those of a batch."""
    return [(b"k", b"%d-%d" % (number, index)) for index in range(PER_BATCH)]


def write(broker: str, topic: str, *numbers: int, partition: int = 0) -> None:
    """A batch for each number."""
    for number in numbers:
        write_batch(broker, topic, records(number), partition)


def damage_batch(damage: Damage, log: PartitionLog, number: int) -> None:
    damage.apply(log, log.at(number * PER_BATCH), records(number))


def read(consumer: SkippingConsumer, partitions: int = 1) -> tuple[list[bytes], list[SkippedRange]]:
    """Everything to the present ends of so many partitions: values, and what was passed over."""
    values: list[bytes] = []
    passed: list[SkippedRange] = []
    ended: set[int | None] = set()

    def is_done() -> bool:
        for one in consumer.poll_batch(100, 0.1):
            if isinstance(one, SkippedRange):
                passed.append(one)
            elif (error := one.error()) is None:
                values.append(one.value() or b"")
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add(one.partition())
        return len(ended) == partitions

    eventually(is_done, what="the end of the partitions")
    return values, passed


def counted(problem: str) -> float:
    return float(metrics.UNREADABLE_RECORDS.labels(reader=READER, problem=problem)._value.get())


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_what_stands_around_it_is_read(
    broker: str, broker_log_dir: Path, unique: str, consumer: SkippingConsumer, damage: Damage, where: str
) -> None:
    make_topic(broker, unique)
    write(broker, unique, 0, 1, 2)
    number = {"first": 0, "middle": 1, "last": 2}[where]
    damage_batch(damage, PartitionLog.of(broker_log_dir, unique), number)
    before = None if damage.problem is None else counted(damage.problem)
    consumer.assign([TopicPartition(unique, 0, 0)])
    values, passed = read(consumer)
    expected = [
        value
        for batch in (0, 1, 2)
        for _, value in (records(batch)[damage.survivors] if batch == number else records(batch))
    ]
    assert values == expected
    if damage.problem is None:
        assert passed == []
    else:
        (one,) = passed
        first = number * PER_BATCH
        assert (one.topic, one.partition, one.first, one.end) == (unique, 0, first, first + PER_BATCH)
        assert one.problem == damage.problem
        assert counted(damage.problem) == (before or 0) + PER_BATCH
        assert f"offsets {first} to {first + PER_BATCH - 1}" in str(one)
    write(broker, unique, 3)
    assert read(consumer)[0] == [value for _, value in records(3)]


def test_several_in_a_row_are_passed_one_by_one(
    broker: str, broker_log_dir: Path, unique: str, consumer: SkippingConsumer
) -> None:
    make_topic(broker, unique)
    write(broker, unique, 0, 1, 2, 3)
    log = PartitionLog.of(broker_log_dir, unique)
    bad_crc, _, garbage = UNREADABLE
    for damage, number in ((bad_crc, 1), (garbage, 2)):
        damage_batch(damage, log, number)
    consumer.assign([TopicPartition(unique, 0, 0)])
    values, passed = read(consumer)
    assert values == [value for number in (0, 3) for _, value in records(number)]
    assert [(one.first, one.end, one.problem) for one in passed] == [
        (3, 6, bad_crc.problem),
        (6, 9, garbage.problem),
    ]


@pytest.mark.parametrize("count", [1, 2, 300])
def test_the_end_of_a_batch_of_any_size_is_found(
    broker: str, broker_log_dir: Path, unique: str, consumer: SkippingConsumer, count: int
) -> None:
    make_topic(broker, unique)
    write_batch(broker, unique, [(b"k", b"lost")] * count)
    write_batch(broker, unique, [(b"k", b"found")])
    log = PartitionLog.of(broker_log_dir, unique)
    log.flip(log.at(0))
    consumer.assign([TopicPartition(unique, 0, 0)])
    values, passed = read(consumer)
    assert values == [b"found"]
    assert [(one.first, one.end) for one in passed] == [(0, count)]


@pytest.mark.parametrize("protocol", ["eager", "cooperative", "consumer"])
def test_the_other_partitions_of_a_member_go_on_where_they_are(
    broker: str, broker_log_dir: Path, unique: str, config: ClientConfig, protocol: str
) -> None:
    make_topic(broker, unique, partitions=3)
    for partition in range(3):
        write(broker, unique, *(3 * partition + number for number in range(3)), partition=partition)
    log = PartitionLog.of(broker_log_dir, unique, 1)
    log.flip(log.at(PER_BATCH))
    protocols = {
        "eager": {"partition.assignment.strategy": "range"},
        "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
        "consumer": {"group.protocol": "consumer"},
    }
    member = SkippingConsumer(config | {"auto.offset.reset": "earliest"} | protocols[protocol], READER)
    assignments: list[list[TopicPartition]] = []
    try:
        member.subscribe([unique], on_assign=lambda _member, partitions: assignments.append(partitions))
        values, passed = read(member, partitions=3)
    finally:
        member.close()
    # A group may assign its partitions once more; what was not committed is then read, and passed, again.
    assert {(one.partition, one.first, one.end) for one in passed} == {(1, 3, 6)}
    assert len(passed) <= len(assignments)
    assert set(values) == {value for number in range(9) if number != 4 for _, value in records(number)}
    assert len(values) == len(set(values)) or len(assignments) > 1


def test_a_seek_works_where_retention_ran_past_the_reader(broker: str, unique: str, consumer: SkippingConsumer) -> None:
    make_topic(broker, unique)
    write(broker, unique, 0, 1)
    place = TopicPartition(unique, 0, PER_BATCH)
    admin = AdminClient({"bootstrap.servers": broker})
    admin.delete_records([place])[place].result(PATIENCE_S)
    consumer.assign([TopicPartition(unique, 0, 1)])
    message = consumer.poll(PATIENCE_S)
    assert message is not None
    error = message.error()
    assert error is not None
    assert error.code() == KafkaError._AUTO_OFFSET_RESET
    consumer.seek(place)
    assert read(consumer)[0] == [value for _, value in records(1)]


def test_headers_with_a_key_that_is_no_text_are_none_and_counted(
    broker: str, broker_log_dir: Path, unique: str, consumer: SkippingConsumer
) -> None:
    make_topic(broker, unique)
    write(broker, unique, 0, 1)
    (damage,) = (damage for damage in DAMAGES if "header" in damage.name)
    damage_batch(damage, PartitionLog.of(broker_log_dir, unique), 0)
    consumer.assign([TopicPartition(unique, 0, 0)])
    before = counted(BAD_HEADERS)
    found = []
    for _ in range(PER_BATCH + 1):
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        found.append((message.value(), list(message_headers(message, READER))))
    assert found == [*((value, []) for _, value in records(0)), (b"1-0", [("filler", b"." * 1_000)])]
    assert counted(BAD_HEADERS) == before + PER_BATCH
