"""Logs of a few batches, and what can be wrong with one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.skipping_consumer import BAD_CHECKSUM, BAD_COMPRESSION, UNKNOWN_FORMAT
from tests.kit.broker_log import GZIP, Batch, PartitionLog, Record, noise, records_filling
from tests.kit.waiting import PATIENCE_S

KeyAndValue = tuple[bytes, bytes]

_FILLER: list[tuple[str, str | bytes | None]] = [("filler", b"." * 1_000)]
"""A header whose bytes are room for what a test writes instead. librdkafka may go on within a batch with a bad checksum
and take what it finds for a header; in dots it finds a format that it does not know, and not one that it dies of."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One kind of it.

    Attributes:
        name: what was done.
        apply: does it to a batch, which holds these records.
        survivors: which of them can still be read, by their place in the batch.
        problem: the metric's label for what a reader then passes over; None when it is no problem at all.
    """

    name: str
    apply: Callable[[PartitionLog, Batch, Sequence[KeyAndValue]], None]
    survivors: slice
    problem: str | None = None

    def __str__(self) -> str:
        return self.name


_NONE, _ALL, _LAST = slice(0, 0), slice(None), slice(-1, None)


def _records(given: Sequence[KeyAndValue], name: bytes) -> list[Record]:
    return [Record(value, key, headers=((name, b"1"),)) for key, value in given]


DAMAGES = (
    Damage("bad CRC", lambda log, batch, _: log.flip(batch, -40), _NONE, BAD_CHECKSUM),
    Damage("unknown magic", lambda log, batch, _: log.set_magic(batch, 3), _NONE, UNKNOWN_FORMAT),
    Damage(
        "garbage for gzip",
        lambda log, batch, _: log.replace(batch, attributes=GZIP, body=noise(batch)),
        _NONE,
        BAD_COMPRESSION,
    ),
    Damage("empty batch", lambda log, batch, given: log.make_empty(batch, _records(given, b"h")[-1]), _LAST),
    Damage("control batch", lambda log, batch, _: log.make_control(batch), _NONE),
    Damage(
        "header key that is no UTF-8",
        lambda log, batch, given: log.replace(batch, body=records_filling(batch, _records(given, b"\xff\xfe"))),
        _ALL,
    ),
)
UNREADABLE = tuple(damage for damage in DAMAGES if damage.problem is not None)


def make_topic(broker: str, name: str, partitions: int = 1) -> None:
    """Create a topic of one replica."""
    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(PATIENCE_S)


def write_batch(broker: str, topic: str, records: Sequence[KeyAndValue], partition: int = 0) -> int:
    """Write these as one batch. Returns the offset of the first."""
    offsets: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset() or 0)

    producer = Producer({"bootstrap.servers": broker, "enable.idempotence": True, "linger.ms": 1_000})
    for key, value in records:
        producer.produce(topic, value, key, partition, headers=_FILLER, on_delivery=delivered)
    assert producer.flush(PATIENCE_S) == 0
    assert offsets == list(range(offsets[0], offsets[0] + len(records)))
    return offsets[0]
