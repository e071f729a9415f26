"""Read the dead-letter topics, one partition after another, with a consumer that joins no group."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from fairlane.closing import Closing
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec
from fairlane.kafka_config import read_committed_consumer
from fairlane.names import observer_group
from fairlane.records import SourceCoordinate
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer, message_headers
from fairlane_server.dead_letters.letters import Letter, ReplayMark, StoredRecord, headers_of, read_record
from fairlane_server.kafka.cluster_admin import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, ClusterAdmin, ClusterError

SILENCE_S = 30.0
"""A read that gets nothing for so long gives up; the broker aborts an abandoned transaction sooner."""

_POLL_S = 0.2
_READER = "dead_letters"

_NO_RIGHT_TO_THE_GROUP = KafkaError.GROUP_AUTHORIZATION_FAILED
"""The client looks up the coordinator of its group, although it never joins the group."""


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """Offsets of a partition from ``first`` up to but not including ``end``."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    def __len__(self) -> int:
        return max(0, self.end - self.first)


class DeadLetterReader(Closing):
    """The dead-letter topics as they can be read now. For one thread; a context manager, or call ``close``."""

    def __init__(self, settings: KafkaSettings, codec: Codec) -> None:
        """Connect without reading. Raises ClusterError when no broker answers."""
        self._codec = codec
        self._errors = LastConnectionError()
        self._cluster = ClusterAdmin(settings)
        self._topics = self._cluster.metadata().topics
        # The group is never joined and nothing is committed: partitions are assigned by hand.
        config = read_committed_consumer(settings, observer_group("dead-letters")) | {"enable.partition.eof": True}
        self._consumer = SkippingConsumer(quiet_config(config, self._errors), _READER)

    def close(self) -> None:
        self._consumer.close()

    def stretches(
        self, topics: Iterable[str], *, since_ms: int | None = None, partition: int | None = None, whole: bool = False
    ) -> list[PartitionRange]:
        """The offsets of these topics that can be read now, by default everything committed.

        ``since_ms`` leaves out an older beginning. With ``whole``, reading waits for a transaction that is still open
        instead of ending before it: what is committed behind it would otherwise be hidden. Raises ClusterError when a
        topic or the partition does not exist.
        """
        try:
            return [
                self._stretch(topic, number, since_ms, whole=whole)
                for topic in topics
                for number in self._partitions(topic, partition)
            ]
        except KafkaException as error:
            raise ClusterError(reason_of(error)) from None

    def offset_at(self, topic: str, partition: int, at_ms: int) -> int | None:
        """The first offset with a timestamp at or after ``at_ms``; None when all are older. Raises ClusterError."""
        place = TopicPartition(topic, partition, max(0, at_ms))
        try:
            (found,) = self._consumer.offsets_for_times([place], timeout=CONNECT_TIMEOUT_S)
        except KafkaException as error:
            raise ClusterError(f"{topic}: {reason_of(error)}") from None
        if found.error is not None:
            raise ClusterError(f"{topic}: {found.error.str()}")
        return found.offset if found.offset >= 0 else None

    def read(self, stretch: PartitionRange) -> Iterator[tuple[int, Letter | ReplayMark]]:
        """The letters and marks of a stretch in order, each with its offset; holds one at a time.

        Raises ClusterError when Kafka falls silent or retention removed records of the stretch.
        """
        for message in self._messages(stretch):
            yield message.offset() or 0, read_record(_stored(message), self._codec)

    def find(self, place: SourceCoordinate) -> Letter | None:
        """The letter at one offset; None when there is none. Raises ClusterError."""
        (stretch,) = self.stretches([place.topic], partition=place.partition)
        if not stretch.first <= place.offset < stretch.end:
            return None
        one = PartitionRange(place.topic, place.partition, place.offset, place.offset + 1)
        return next((found for _, found in self.read(one) if isinstance(found, Letter)), None)

    def delete_before(self, topic: str, partition: int, offset: int) -> int:
        """Delete all records before an offset. Returns the first remaining offset. Raises ClusterError."""
        place = TopicPartition(topic, partition, offset)
        deleting = self._cluster.admin.delete_records(
            [place], request_timeout=REQUEST_TIMEOUT_S, operation_timeout=REQUEST_TIMEOUT_S
        )
        try:
            return int(next(iter(deleting.values())).result(REQUEST_TIMEOUT_S).low_watermark)
        except (KafkaException, FutureTimeout) as error:
            raise ClusterError(f"{topic}-{partition}: not deleted: {reason_of(error)}") from None

    def _partitions(self, topic: str, only: int | None) -> list[int]:
        found = self._topics.get(topic)
        if found is None:
            raise ClusterError(f"{topic}: no such topic; `fairlane topics apply` creates it")
        if found.error is not None:
            raise ClusterError(f"{topic}: {found.error.str()}")
        if only is not None and only not in found.partitions:
            raise ClusterError(f"{topic}: it has no partition {only}")
        return sorted(found.partitions) if only is None else [only]

    def _stretch(self, topic: str, partition: int, since_ms: int | None, *, whole: bool) -> PartitionRange:
        bounds = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CONNECT_TIMEOUT_S)
        if bounds is None:
            raise ClusterError(f"{topic}: no answer within {CONNECT_TIMEOUT_S:g} s")
        first, end = bounds
        if whole:
            end = self._end_of_everything(topic, partition)
        if since_ms is not None:
            since = self.offset_at(topic, partition, since_ms)
            first = end if since is None else max(first, since)
        return PartitionRange(topic, partition, first, end)

    def _end_of_everything(self, topic: str, partition: int) -> int:
        place = TopicPartition(topic, partition)
        asked = self._cluster.admin.list_offsets(
            {place: OffsetSpec.latest()},  # type: ignore[no-untyped-call]  # confluent-kafka's, without types
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=CONNECT_TIMEOUT_S,
        )
        try:
            return int(next(iter(asked.values())).result(CONNECT_TIMEOUT_S).offset)
        except FutureTimeout:
            raise ClusterError(f"{topic}: no answer within {CONNECT_TIMEOUT_S:g} s") from None

    def _messages(self, stretch: PartitionRange) -> Iterator[Message]:
        if not len(stretch):
            return
        position = stretch.first
        self._consumer.assign([TopicPartition(stretch.topic, stretch.partition, position)])
        try:
            while position < stretch.end:
                message = self._next(stretch)
                offset = message.offset() or 0
                if message.error() is not None:
                    # End of the partition: its offset also counts transaction markers, which are no records.
                    position = offset
                elif offset < stretch.end:
                    yield message
                    position = offset + 1
                else:
                    return
        finally:
            self._consumer.unassign()

    def _next(self, stretch: PartitionRange) -> Message:
        """The next record, or the current end of the partition. Raises ClusterError."""
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            try:
                message = self._consumer.poll(_POLL_S)
            except KafkaException as raised:
                raise ClusterError(f"{stretch.name}: {reason_of(raised)}") from None
            error = None if message is None else message.error()
            if message is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
                return message
            if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise ClusterError(f"{stretch.name}: what was to be read is gone: retention or a purge removed it")
            if error is not None and not error.retriable() and error.code() != _NO_RIGHT_TO_THE_GROUP:
                raise ClusterError(f"{stretch.name}: {error.str()}")
        reason = self._errors.text or "a transaction is open there, or the broker is slow"
        raise ClusterError(f"{stretch.name}: not read to its end: nothing came for {SILENCE_S:g} s ({reason})")


def _stored(message: Message) -> StoredRecord:
    place = SourceCoordinate(str(message.topic()), message.partition() or 0, message.offset() or 0)
    return StoredRecord(
        place,
        message.timestamp()[1],
        message.key(),
        message.value() or b"",
        headers_of(message_headers(message, _READER)),
    )
