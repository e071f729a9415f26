"""Publishing to the compacted control topics: the published records of tenants and models, and the changes to publish.

The last record of a key is what every process believes; a record without a value takes the key back.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import observer_group
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer
from fairlane_server.kafka.cluster_admin import CONNECT_TIMEOUT_S, ClusterAdmin, ClusterError

RecordT = TypeVar("RecordT")

_READ_TIMEOUT_S = 20.0
_FLUSH_TIMEOUT_S = 30.0
_NO_LEADER_YET = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
"""What a broker says for a moment of a topic that was just created."""


@dataclass(frozen=True, slots=True)
class Publication(Generic[RecordT]):
    """Records to publish on a control topic, by key: new ones and those that differ from the published ones.

    ``unknown`` are published keys that the file does not name any more. ``foreign`` are keys of the file that something
    else manages: they are not published.
    """

    changed: Mapping[str, RecordT]
    unchanged: tuple[str, ...]
    unknown: tuple[str, ...]
    foreign: tuple[str, ...] = ()


def compare(
    wanted: Mapping[str, RecordT], published: Mapping[str, RecordT | None], foreign: Collection[str] = ()
) -> Publication[RecordT]:
    """Decide what to publish. ``published`` is None for a key whose last record cannot be read; ``foreign`` are keys
    that something else manages."""
    own = {key: record for key, record in wanted.items() if key not in foreign}
    changed = {key: record for key, record in own.items() if published.get(key) != record}
    return Publication(
        changed,
        tuple(key for key in own if key not in changed),
        tuple(sorted(published.keys() - wanted.keys() - {*foreign})),
        tuple(key for key in wanted if key in foreign),
    )


class ControlTopic(Generic[RecordT]):
    """One control topic. ``kind`` says in messages what a record is."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        topic: str,
        *record_types: type[RecordT],
        kind: str,
        key_of: Callable[[RecordT], str] | None = None,
    ) -> None:
        """``key_of`` None: the field that is called like the kind."""
        self._settings = settings
        self._codec = codec
        self.topic = topic
        self._record_types = record_types
        self._key_of = key_of or attrgetter(kind)
        self.kind = kind

    def read_if_there(self) -> dict[str, RecordT | None]:
        """As ``read``; nothing when the topic does not exist."""
        return self.read() if self.topic in ClusterAdmin(self._settings).metadata().topics else {}

    def read(self) -> dict[str, RecordT | None]:
        """The last record of every key that was not taken back; None for one that cannot be read.

        Raises ClusterError when the topic does not exist or is not read to its end in time.
        """
        records: dict[str, RecordT | None] = {}
        for key, value in _read_to_end(self._settings, self.topic).items():
            try:
                records[key] = self._codec.decode_any(self._record_types, value)
            except DecodeError:
                records[key] = None
        return records

    def publish(self, records: Iterable[RecordT], withdrawn: Iterable[str] = ()) -> None:
        """Publish records, and an empty one for each withdrawn key. Returns when the brokers have acknowledged all.

        Raises ClusterError when one was not acknowledged.
        """
        values = self.values_of(records, withdrawn)
        if values:
            _publish(self._settings, self.topic, values)

    def values_of(self, records: Iterable[RecordT], withdrawn: Iterable[str] = ()) -> dict[str, bytes | None]:
        """The values to publish, by key: encoded records, and None for withdrawn keys."""
        values: dict[str, bytes | None] = {self._key_of(record): self._codec.encode(record) for record in records}
        return values | dict.fromkeys(withdrawn)


def _read_to_end(settings: KafkaSettings, topic: str) -> dict[str, bytes]:
    # Asking the consumer for a missing topic would wait for its timeout; the metadata knows at once.
    found = ClusterAdmin(settings).metadata().topics.get(topic)
    if found is None:
        raise ClusterError(f"{topic}: no such topic; `fairlane topics apply` creates it")
    errors = LastConnectionError()
    # The group is never joined and nothing is committed: partitions are assigned by hand.
    config = read_committed_consumer(settings, observer_group("control"))
    config |= {"enable.partition.eof": True, "fetch.wait.max.ms": 10}
    consumer = SkippingConsumer(quiet_config(config, errors), "control")
    latest: dict[str, bytes] = {}
    unread = set(found.partitions)
    deadline = time.monotonic() + _READ_TIMEOUT_S
    try:
        consumer.assign([_first_offset(consumer, topic, partition) for partition in found.partitions])
        while unread:
            if time.monotonic() > deadline:
                reason = errors.text or "slow"
                raise ClusterError(f"{topic}: not read to its end within {_READ_TIMEOUT_S:g} s ({reason})")
            message = consumer.poll(0.2)
            if message is not None:
                _take(message, latest, unread)
    except KafkaException as error:
        raise ClusterError(f"{topic}: {reason_of(error)}") from None
    finally:
        consumer.close()
    return latest


def _first_offset(consumer: Consumer, topic: str, partition: int) -> TopicPartition:
    # Assigned to "the beginning", librdkafka first waits half a second for a leader that it has not looked up yet.
    try:
        offsets = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CONNECT_TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() not in _NO_LEADER_YET:
            raise
        return TopicPartition(topic, partition, OFFSET_BEGINNING)
    if offsets is None:
        raise ClusterError(f"{topic}: no answer within {CONNECT_TIMEOUT_S:g} s")
    return TopicPartition(topic, partition, offsets[0])


def _take(message: Message, latest: dict[str, bytes], unread: set[int]) -> None:
    error = message.error()
    if error is not None:
        if error.code() == KafkaError._PARTITION_EOF:
            unread.discard(message.partition() or 0)
        elif not error.retriable():
            raise ClusterError(f"{message.topic()}: {error.str()}")
        return
    key, value = message.key(), message.value()
    if key is None:
        return
    if value is None:
        latest.pop(key.decode(errors="replace"), None)
    else:
        latest[key.decode(errors="replace")] = value


def _publish(settings: KafkaSettings, topic: str, values: Mapping[str, bytes | None]) -> None:
    errors = LastConnectionError()
    failures: list[str] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(f"{(message.key() or b'').decode(errors='replace')}: {error.str()}")

    try:
        producer = KafkaProducer(quiet_config(idempotent_producer(settings), errors))
        for key, value in values.items():
            producer.produce(topic, key=key.encode(), value=value, on_delivery=delivered)
        unsent = producer.flush(_FLUSH_TIMEOUT_S)
    except (KafkaException, BufferError) as error:
        raise ClusterError(f"{topic}: {reason_of(error)}") from None
    if unsent:
        raise ClusterError(f"{topic}: {unsent} records not acknowledged within {_FLUSH_TIMEOUT_S:g} s ({errors.text})")
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise ClusterError(f"{topic}: not published: {failures[0]}{more}")
