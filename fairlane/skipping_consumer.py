"""Read on behind unreadable data: a consumer that skips damaged batches, and a guard against undecodable headers.

librdkafka stops at a batch with a bad checksum, an unknown format or invalid compressed bytes: it reports an error once
or at every fetch, or falls silent, and makes no progress. The consumer here finds the end of the batch with a second
consumer and continues behind it. The bytes are not available; the offsets and the reason are, and the reader decides
what to do with them.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import monotonic

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.cluster import with_broker_check
from fairlane.kafka_clients import KafkaConsumer
from fairlane.kafka_config import ClientConfig
from fairlane.logs import get_logger


def end_of_batch(base: int, log_end: int, look: Callable[[int], int | None]) -> int:
    """The end of an unreadable batch: from ``base``, its first offset, up to ``log_end``. Pure.

    A broker answers a fetch at any offset of a batch with the whole batch, so a fetch either fails as it did at the
    first offset, or reads beyond the batch. Steps double until one lands beyond; from there the interval is halved:
    about twenty fetches for a batch of a thousand records.

    ``look`` fetches an offset: None when it is inside the batch, else an offset that is known to be beyond. Raises
    ValueError when that one is known to be inside.
    """
    inside, beyond = base, log_end
    step = 1  # 0 once a fetched offset was beyond
    while beyond - inside > 1:
        offset = min(inside + step, beyond - 1) if step else (inside + beyond) // 2
        found = look(offset)
        if found is None:
            inside, step = offset, 2 * step
        elif found <= inside:
            raise ValueError(f"{found} is inside of the batch, which reaches to {inside} at least")
        else:
            beyond, step = min(beyond, found), 0
    return beyond


log = get_logger(__name__)

BAD_CHECKSUM = "bad_checksum"
BAD_COMPRESSION = "bad_compression"
UNKNOWN_FORMAT = "unknown_format"
BAD_HEADERS = "bad_headers"

_PROBLEMS = {
    KafkaError._BAD_MSG: BAD_CHECKSUM,
    KafkaError._BAD_COMPRESSION: BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED: UNKNOWN_FORMAT,
}
_SEARCH_TIMEOUT_S = 90.0
_CALL_TIMEOUT_S = 5.0
_POLL_S = 0.1
_SEARCH_WAIT_MS = 100
_SILENT_POLLS = 5
"""Nothing will come after so many silent polls, twice, while the end of the same partition answers."""

_BROKER_FAILURES = 10

Headers = Sequence[tuple[str, str | bytes | None]]
PartitionPlace = tuple[str, int]
OnAssignment = Callable[[Consumer, list[TopicPartition]], None]


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Skipped offsets, from ``first`` up to but not including ``end``: one batch, with its markers and gaps."""

    topic: str
    partition: int
    first: int
    end: int
    problem: str
    reason: str
    """The client library's message. It contains numbers and quotes no record."""

    def __str__(self) -> str:
        return f"offsets {self.first} to {self.end - 1} cannot be read ({self.problem}): {self.reason}"


def problem_of(error: KafkaError) -> str | None:
    """The problem of the batch that this error reports; None for an error about anything else."""
    return _PROBLEMS.get(error.code())


class SkippingConsumer(KafkaConsumer):
    """A consumer that skips unreadable batches. Each is counted and logged with its offsets.

    Finding the end of such a batch blocks ``poll`` and ``consume`` for some tenths of a second, or some seconds if its
    format is unknown. Until the end is found, the partition does not advance.

    Args:
        config: of this consumer; each search makes another one like it, which joins no group.
        reader: the value of the metric's label `reader`.
        on_unreadable: called with each range, within ``poll`` and ``consume``.
    """

    def __init__(
        self,
        config: ClientConfig,
        reader: str,
        on_unreadable: Callable[[SkippedRange], None] | None = None,
        **more: object,
    ) -> None:
        super().__init__(with_broker_check(config), **more)
        # Answered well before a poll counts as silent.
        self._search_config = config | {"enable.partition.eof": True, "fetch.wait.max.ms": _SEARCH_WAIT_MS}
        self._reader = reader
        self.on_unreadable = on_unreadable
        self._passed_to: dict[PartitionPlace, int] = {}
        """Where reading continues, for partitions that were moved and have delivered nothing since."""
        self._last_passed: dict[PartitionPlace, SkippedRange] = {}

    def subscribe(
        self,
        topics: list[str],
        on_assign: OnAssignment | None = None,
        on_revoke: OnAssignment | None = None,
        on_lost: OnAssignment | None = None,
    ) -> None:
        def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            # A range skipped under an earlier assignment may be lost with it: skip and report it again.
            for one in partitions:
                self._last_passed.pop((one.topic, one.partition), None)
            if on_assign is not None:
                on_assign(consumer, partitions)

        others = {"on_revoke": on_revoke, "on_lost": on_lost}
        given = {name: callback for name, callback in others.items() if callback is not None}
        super().subscribe(topics, on_assign=assigned, **given)

    def poll(self, timeout: float = -1) -> Message | None:
        message = super().poll(timeout)
        if message is None:
            return None
        return next(iter(self._readable(self._sift((message,)))), None)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        return self._readable(self._sift(super().consume(num_messages, timeout)))

    def poll_batch(self, num_messages: int, timeout: float) -> list[Message | SkippedRange]:
        """Return as soon as there is anything: records, errors and skipped ranges, in offset order."""
        first = super().poll(timeout)
        if first is None:
            return []
        return self._sift((first, *super().consume(num_messages, 0)))

    @staticmethod
    def _readable(found: Iterable[Message | SkippedRange]) -> list[Message]:
        return [one for one in found if not isinstance(one, SkippedRange)]

    def _sift(self, messages: Sequence[Message]) -> list[Message | SkippedRange]:
        found: list[Message | SkippedRange] = []
        moved: set[PartitionPlace] = set()
        for message in messages:
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            if topic is None or partition is None:
                found.append(message)
                continue
            place = (topic, partition)
            error = message.error()
            if place in moved or self._is_astray(place, error, offset):
                # Behind a damaged batch the library may take some of its bytes for the next batch's header.
                continue
            problem = None if error is None else problem_of(error)
            if error is None or problem is None or offset is None or offset < 0:
                found.append(message)
                continue
            passed = self._pass_over(place, offset, problem, error.str())
            if place in self._passed_to:
                moved.add(place)
            if passed is not None:
                found.append(passed)
        return found

    def _is_astray(self, place: PartitionPlace, error: KafkaError | None, offset: int | None) -> bool:
        """Whether this error is about an offset that the library read inside a damaged batch."""
        end = self._passed_to.get(place)
        if end is None:
            return False
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            del self._passed_to[place]
            return False
        return error.code() == KafkaError._AUTO_OFFSET_RESET and offset is not None and offset > end

    def _pass_over(self, place: PartitionPlace, offset: int, problem: str, reason: str) -> SkippedRange | None:
        topic, partition = place
        last = self._last_passed.get(place)
        if last is not None and last.first == offset and self._passed_to.get(place, last.end) == last.end:
            # The library repeats the error before anything arrives from the new position but perhaps its end.
            self._passed_to[place] = last.end
            self.seek(TopicPartition(topic, partition, last.end))
            return None
        try:
            end = _end_of_batch(self._search_config, topic, partition, offset)
        except KafkaException as error:
            log.warning("unreadable_batch_stays", topic=topic, partition=partition, offset=offset, reason=str(error))
            # This position gives the error again, and with it the next attempt.
            self._passed_to[place] = offset
            self.seek(TopicPartition(topic, partition, offset))
            return None
        if end is not None:
            self._passed_to[place] = end
            self.seek(TopicPartition(topic, partition, end))
        passed = SkippedRange(topic, partition, offset, offset + 1 if end is None else end, problem, reason)
        self._last_passed[place] = passed
        metrics.UNREADABLE_RECORDS.labels(reader=self._reader, problem=problem).inc(passed.end - offset)
        log.error(
            "unreadable_batch_passed",
            reader=self._reader,
            topic=topic,
            partition=partition,
            first_offset=offset,
            last_offset=passed.end - 1,
            problem=problem,
            reason=reason,
        )
        if self.on_unreadable is not None:
            self.on_unreadable(passed)
        return passed

    def seek(self, partition: TopicPartition) -> None:
        """Continue there, even if the library has stopped the partition, as it does when the wanted offset is not in
        the log."""
        try:
            super().seek(partition)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            self._assign_anew(partition)

    def _assign_anew(self, place: TopicPartition) -> None:
        try:
            self.incremental_unassign([place])
            self.incremental_assign([place])
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            # The eager protocol knows whole assignments only. The other partitions continue at their positions.
            assigned = self.assignment()
            starts = {
                (given.topic, given.partition): given if now.offset < 0 else now
                for given, now in zip(assigned, self.position(assigned), strict=True)
            }
            self.assign(list((starts | {(place.topic, place.partition): place}).values()))


def message_headers(message: object, reader: str) -> Headers:
    """A message's headers; empty, and counted, when one of their names is not UTF-8. Call it once per message.

    For such a name confluent-kafka builds a list with a hole in it and leaves an exception set without raising it; an
    optimised call would pass on both. Called from C (``operator.methodcaller``), this becomes an error at once, and the
    list is never touched.
    """
    try:
        found: Headers | None = _HEADERS(message)
    except (SystemError, UnicodeDecodeError):
        metrics.UNREADABLE_RECORDS.labels(reader=reader, problem=BAD_HEADERS).inc()
        return ()
    return found or ()


_HEADERS = operator.methodcaller("headers")


class _Seen(Enum):
    INSIDE = "inside"
    BEYOND = "beyond"
    NOTHING = "nothing"


class _BrokerFailsError(Exception):
    """The broker fails on the batch and serves nothing that begins in it or behind it."""


def _end_of_batch(config: ClientConfig, topic: str, partition: int, base: int) -> int | None:
    """Where the batch that begins at ``base`` ends; None when no fetch can begin behind it, so that only records
    fetched together with it can be read. Raises KafkaException when the end is not found in time."""
    consumer = KafkaConsumer(config)
    search = _Search(consumer, topic, partition, base)
    try:
        return search.run()
    except _BrokerFailsError:
        return None
    finally:
        try:
            search.rest()
        finally:
            consumer.close()


class _Search:
    def __init__(self, consumer: Consumer, topic: str, partition: int, base: int) -> None:
        self._consumer = consumer
        self._topic = topic
        self._partition = partition
        self._base = base
        self._log_end: int | None = None
        self._deadline = monotonic() + _SEARCH_TIMEOUT_S

    def run(self) -> int:
        place = TopicPartition(self._topic, self._partition)
        _, log_end = self._consumer.get_watermark_offsets(place, timeout=_CALL_TIMEOUT_S)
        self._log_end = log_end
        if log_end <= self._base:
            raise KafkaException(KafkaError(KafkaError._NO_OFFSET, f"the log ends at {log_end}"))

        def look(offset: int) -> int | None:
            seen, where = self._look(offset)
            if seen is _Seen.NOTHING:
                # Silence means inside, if the broker answers at all: within a batch of unknown format the library is
                # silent.
                if self._look(log_end)[0] is not _Seen.BEYOND:
                    raise _timed_out(f"no answer at the end of the log, {log_end}")
                seen, where = self._look(offset)
            return where if seen is _Seen.BEYOND else None

        return end_of_batch(self._base, log_end, look)

    def rest(self) -> None:
        """Leave the consumer where it can be closed: librdkafka can hang forever in a close during an offset reset,
        which follows when it took bytes of a damaged batch for a header."""
        if self._log_end is not None and self._look(self._log_end)[0] is not _Seen.BEYOND:
            log.warning("search_left_astray", topic=self._topic, partition=self._partition)

    def _look(self, offset: int) -> tuple[_Seen, int]:
        """Fetch from this offset. Returns what was seen, and the offset from which on records are beyond the batch."""
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])
        silent_polls = failures = 0
        while silent_polls < _SILENT_POLLS:
            if monotonic() > self._deadline:
                raise _timed_out(f"not found within {_SEARCH_TIMEOUT_S:g} s")
            message = self._consumer.poll(_POLL_S)
            error = None if message is None else message.error()
            if message is None:
                silent_polls += 1
            elif error is not None and error.code() == KafkaError.UNKNOWN:
                failures += 1
                if failures >= _BROKER_FAILURES:
                    raise _BrokerFailsError
            elif error is None or error.code() == KafkaError._PARTITION_EOF:
                return _Seen.BEYOND, offset
            elif problem_of(error) is not None:
                # The first error after the assignment, so it is about the first batch fetched.
                begins = self._base if message.offset() is None else message.offset() or 0
                return (_Seen.BEYOND, min(offset, begins)) if begins > self._base else (_Seen.INSIDE, offset)
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise KafkaException(error)
        return _Seen.NOTHING, offset


def _timed_out(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, reason))
