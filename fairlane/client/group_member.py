"""Reader of a reply topic in a consumer group: at least once; commits when a reply is handled."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.client.connector import log
from fairlane.client.reader import PERMANENT_ERRORS, ask, end_of, existing_partitions
from fairlane.cluster import reason_of
from fairlane.codec import Codec, DecodeError, DecodeProblem
from fairlane.committed import TopicIdLookup, resume_points
from fairlane.errors import Unavailable
from fairlane.offsets import CommitPoint
from fairlane.ownership import PartitionId
from fairlane.records import InferenceReply
from fairlane.schema_registry import RegistryError
from fairlane.skipping_consumer import SkippedRange, message_headers
from fairlane.trace_context import TraceHeaders, trace_headers

ResultT = TypeVar("ResultT")


class SerialExecutor:
    """Runs each call on a daemon thread once the one before it is over. For one caller at a time."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def call(self, work: Callable[[], ResultT], timeout_s: float) -> ResultT:
        """The result of ``work``, or what it raised.

        Raises:
            TimeoutError: it is not over after ``timeout_s``; it goes on, and later calls wait for its end.
        """
        outcome: Future[ResultT] = Future()
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised by the caller's wait
                outcome.set_exception(error)

        # A daemon: a broker that never answers must not keep the process from ending.
        self._last = threading.Thread(target=run, name="fairlane-blocking-call", daemon=True)
        self._last.start()
        return outcome.result(timeout_s)


_READER = "reply_member"
_POLL_S = 0.1
_COMMIT_EVERY_S = 0.2
_ASSIGN_TIMEOUT_S = 10.0
_COMMIT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_LOCK_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class ReplyRecord:
    """A record of a reply topic as it was read. Key and value are not shown when this is printed."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    trace: TraceHeaders = ()


@dataclass(frozen=True, slots=True)
class UndecodableReply(ReplyRecord):
    """A record on a reply topic that is no reply; or the first record, without key, value and time, of a batch that
    cannot be read.

    Attributes:
        problem: what is wrong with it; of a batch `bad_checksum`, `bad_compression` or `unknown_format`.
        why: of a batch, its offsets and the client library's message; otherwise empty.
    """

    problem: DecodeProblem | str = ""
    why: str = ""


OnUndecodable = Callable[[UndecodableReply], None]


class GroupMember:
    """One member. ``next``, ``next_record`` and ``ack`` are for one thread at a time, ``close`` for any."""

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        codec: Codec,
        *,
        from_beginning: bool,
        on_undecodable: OnUndecodable | None,
        idle_timeout_s: float | None,
        start_timeout_s: float,
        topic_ids: TopicIdLookup | None = None,
    ) -> None:
        self.topic = topic
        self.undecodable = 0
        self._consumer = consumer
        self._codec = codec
        self._from_beginning = from_beginning
        self._on_undecodable = on_undecodable
        self._idle_timeout_s = idle_timeout_s
        self._start_timeout_s = start_timeout_s
        self._topic_ids = topic_ids
        self._topic_id = ""
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._subscribed = False
        self._closed = False
        self._assigned: tuple[int, ...] = ()
        """By the group, and not read yet."""
        self._owned: set[int] = set()
        self.latest: ReplyRecord | None = None
        """The record of what was returned last and is not done; None without one."""
        self._latest_end = 0
        """The offset to go on from when it is done."""
        self._passed: deque[SkippedRange] = deque()
        """What could not be read and is not returned yet."""
        # The next offset to read per partition, for all replies done; and what of that was sent to the broker.
        self._done: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._next_commit = 0.0
        self._blocking = SerialExecutor()

    @property
    def trace(self) -> dict[str, str]:
        """Its trace context, by header."""
        return {} if self.latest is None else {name: value.decode() for name, value in self.latest.trace}

    def next(self) -> InferenceReply | None:
        """The next reply; the one before it is done. None when closed or idle for too long.

        Records between them that are no reply are reported, and are done with that.

        Raises:
            Unavailable: the topic does not exist, may not be read, the group or the schema registry is not reachable.
        """
        with self._lock:
            while isinstance(found := self.next_record(), UndecodableReply):
                self._report(found)
            return found

    def next_record(self) -> InferenceReply | UndecodableReply | None:
        """Like ``next``, but for what is no reply, which is returned as well and reported nowhere."""
        with self._lock:
            self._finish_latest()
            idle_since = monotonic()
            while not self._stopping.is_set():
                self._subscribe()
                self._commit_now_and_then()
                message = self._poll()
                if self._assigned:
                    self._take_up()
                    idle_since = monotonic()
                if message is not None:
                    return self._content_of(message)
                if self._passed:
                    return self._unreadable(self._passed.popleft())
                if self._idle_timeout_s is not None and monotonic() - idle_since >= self._idle_timeout_s:
                    self._commit_or_log()
                    return None
            return None

    def passed_over(self, passed: SkippedRange) -> None:
        """The consumer continues behind these offsets; called within its ``poll``."""
        self._passed.append(passed)

    def ack(self) -> None:
        """The latest reply is done; commit that. Raises Unavailable when the broker did not take it."""
        with self._lock:
            self._finish_latest()
            if not self._closed:
                try:
                    self._commit()
                except (KafkaException, TimeoutError) as error:
                    raise Unavailable(f"{self.topic}: not committed: {_why(error)}") from error

    def stop(self) -> None:
        """End a ``next`` that waits in another thread."""
        self._stopping.set()

    def close(self) -> None:
        """Commit what is done and leave the group."""
        self._stopping.set()
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            log.error("reply_stream_not_closed topic=%s", self.topic)
            return
        try:
            if self._closed:
                return
            self._closed = True
            self._commit_or_log()
            self._forget()
            try:
                self._blocking.call(self._consumer.close, _CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.warning("reply_stream_close_goes_on topic=%s: no broker answers", self.topic)
        finally:
            self._lock.release()

    def _subscribe(self) -> None:
        if self._subscribed:
            return
        try:
            existing_partitions(self._consumer, self.topic, monotonic() + self._start_timeout_s)
        except KafkaException as error:
            raise Unavailable(f"no broker answers: {reason_of(error)}") from error
        self._consumer.subscribe(
            [self.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )
        self._subscribed = True

    def _poll(self) -> Message | None:
        """A record; None if there is none, or after a transient error."""
        message = self._consumer.poll(_POLL_S)
        if message is None or (error := message.error()) is None:
            return message
        if error.fatal() or error.code() in PERMANENT_ERRORS:
            raise Unavailable(f"{self.topic}: {error.str()}")
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            # What was lost cannot be had back; what is left can.
            log.error("replies_lost topic=%s partition=%s reason=%s", self.topic, message.partition(), error.str())
            self._go_on(message.partition() or 0)
        else:
            log.warning("reply_stream_error topic=%s name=%s", self.topic, error.name())
        return None

    def _content_of(self, message: Message) -> InferenceReply | UndecodableReply:
        fields = (
            self.topic,
            message.partition() or 0,
            message.offset() or 0,
            message.timestamp()[1],
            message.key(),
            message.value(),
            trace_headers(message_headers(message, _READER)),
        )
        record = ReplyRecord(*fields)
        content: InferenceReply | UndecodableReply
        try:
            content = self._codec.decode_as(InferenceReply, record.value)
        except DecodeError as error:
            self.undecodable += 1
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=error.problem).inc()
            record = content = UndecodableReply(*fields, error.problem)
        except RegistryError as error:
            self._stopping.set()  # going on would count this record as done
            raise Unavailable(str(error)) from error
        self.latest, self._latest_end = record, record.offset + 1
        return content

    def _unreadable(self, passed: SkippedRange) -> UndecodableReply:
        self.undecodable += 1
        bad = UndecodableReply(
            self.topic, passed.partition, passed.first, 0, None, None, problem=passed.problem, why=str(passed)
        )
        self.latest, self._latest_end = bad, passed.end
        return bad

    def _report(self, bad: UndecodableReply) -> None:
        if self._on_undecodable is None:
            log.error(
                "reply_undecodable topic=%s partition=%d offset=%d problem=%s",
                bad.topic,
                bad.partition,
                bad.offset,
                bad.problem,
            )
            return
        try:
            self._on_undecodable(bad)
        except BaseException:
            # Neither going on nor an ack may count this record as done.
            self._stopping.set()
            self.latest = None
            raise

    def _finish_latest(self) -> None:
        if self.latest is not None:
            if self.latest.partition in self._owned:
                self._done[self.latest.partition] = self._latest_end
            self.latest = None

    def _commit_now_and_then(self) -> None:
        if self._done != self._sent and monotonic() >= self._next_commit:
            self._next_commit = monotonic() + _COMMIT_EVERY_S
            self._send_commit()

    def _send_commit(self) -> None:
        """Commit all that is done, without waiting for the answer."""
        if not self._done:
            return
        try:
            self._consumer.commit(offsets=self._offsets(), asynchronous=True)
        except KafkaException as error:  # tried again in a moment; before the partitions go, it is waited for
            log.debug("replies_not_committed_yet topic=%s reason=%s", self.topic, reason_of(error))
        else:
            self._sent = dict(self._done)

    def _commit(self) -> None:
        """Commit all that is done, and wait for it. Raises KafkaException, or TimeoutError without an answer."""
        if self._done:
            done, offsets = dict(self._done), self._offsets()

            def commit() -> list[TopicPartition]:
                # Waits for as long as no broker answers.
                return self._consumer.commit(offsets=offsets, asynchronous=False)

            for committed in self._blocking.call(commit, _COMMIT_TIMEOUT_S):
                if committed.error is not None:
                    raise KafkaException(committed.error)
            self._sent = done

    def _commit_or_log(self) -> None:
        try:
            self._commit()
        except (KafkaException, TimeoutError) as error:
            log.warning("replies_not_committed topic=%s reason=%s: they come again", self.topic, _why(error))

    def _offsets(self) -> list[TopicPartition]:
        return [
            TopicPartition(
                self.topic, partition, offset, metadata=CommitPoint(offset, topic_id=self._topic_id).metadata
            )
            for partition, offset in self._done.items()
        ]

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Acknowledged, and begun when the poll is over: a call in here that waits for a broker would crash the client
        # library at the next callback of the same poll.
        consumer.assign([])
        self._assigned = tuple(partition.partition for partition in partitions)

    def _take_up(self) -> None:
        """Begin to read what was assigned. Raises Unavailable."""
        self._consumer.assign(self._starts(self._assigned))
        self._owned = set(self._assigned)
        self._assigned = ()
        self._next_commit = 0.0

    def _go_on(self, partition: int) -> None:
        """Read on after the position was not in the log. Raises Unavailable."""
        self._done.pop(partition, None)
        for start in self._starts((partition,)):
            self._done[partition] = start.offset
            self._consumer.seek(start)

    def _starts(self, partitions: Iterable[int]) -> list[TopicPartition]:
        """Where to read these. Raises Unavailable."""
        ids = [PartitionId(self.topic, partition) for partition in partitions]
        starts = []
        deadline = monotonic() + _ASSIGN_TIMEOUT_S
        try:
            found = ask(lambda timeout_s: resume_points(self._consumer, ids, timeout_s, self._topic_ids), deadline)
            for partition, resume in found.items():
                position, self._topic_id = resume.position, resume.topic_id
                if resume.committed is None:
                    if not self._from_beginning and not resume.lost:
                        position = end_of(self._consumer, self.topic, partition.partition, deadline)
                    # Committed at once: a crash before the first reply must not move the start.
                    self._done[partition.partition] = position
                starts.append(TopicPartition(self.topic, partition.partition, position))
        except KafkaException as error:
            self._stopping.set()
            raise Unavailable(f"{self.topic}: where the group left off is not known") from error
        return starts

    def _on_revoke(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        # Sent is enough: the coordinator takes it before the request to join again that follows it on the same
        # connection, so the next owner starts behind it. To wait here could be for ever.
        self._send_commit()
        self._forget()

    def _on_lost(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        log.warning("reply_partitions_lost topic=%s: replies in work come again", self.topic)
        self._forget()

    def _forget(self) -> None:
        self._passed.clear()
        self._assigned = ()
        self._owned = set()
        self._done = {}
        self._sent = {}


def _why(error: KafkaException | TimeoutError) -> str:
    return reason_of(error) if isinstance(error, KafkaException) else f"no answer within {_COMMIT_TIMEOUT_S:g} s"
