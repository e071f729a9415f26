"""Reader of the chunk topics of tenants with open streams: one thread, one consumer.

Chunks only make an answer arrive sooner. If a topic cannot be read, that is logged, and answers arrive in one piece.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane.client.reader import end_of, partitions_of
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import FairlaneError
from fairlane.logs import get_logger
from fairlane.names import chunks_topic, tenant_of_chunks
from fairlane.records import ReplyChunk
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.reader_thread import ReaderThread

log = get_logger(__name__)

Chunk = tuple[str, ReplyChunk]
"""Tenant of the chunk topic, and the chunk."""

MOST_TENANTS = 256
_KEPT_S = 60.0
_FOLLOW_TIMEOUT_S = 1.0
_CALL_TIMEOUT_S = 2.0
_POLL_S = 0.02
_IDLE_POLL_S = 0.5
_MAX_RECORDS = 500
_AGAIN_S = 1.0


@dataclass(slots=True)
class _Followed:
    """A tenant whose chunks are read. Used in the event loop only."""

    ready: "asyncio.Future[bool]"
    streams: int = 0
    idle_since_s: float = field(default_factory=monotonic)


class ChunkReader(ReaderThread[ReplyChunk, Chunk]):
    """Call ``follow`` and ``leave`` in the event loop that ``start`` was called in.

    ``consumer`` makes a consumer without a group, ``read_uncommitted``: chunks are not transactional. ``is_wanted`` is
    called on the thread, ``deliver`` in the event loop; while that is busy, chunks wait in Kafka.
    """

    def __init__(
        self,
        consumer: Callable[[], Consumer],
        codec: Codec,
        is_wanted: Callable[[str], bool],
        deliver: Callable[[list[Chunk]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__("chunks", codec, ReplyChunk, deliver, on_failure)
        self._make_consumer = consumer
        self._is_wanted = is_wanted
        self._orders: SimpleQueue[tuple[str, asyncio.Future[bool] | None]] = SimpleQueue()
        """Tenants to start reading, each with the future to resolve, and with None tenants to stop reading."""
        self._followed: dict[str, _Followed] = {}
        self._assigned: dict[str, list[TopicPartition]] = {}
        """Partitions by topic. Used on the thread only."""
        self._passed: set[tuple[str, int]] = set()
        """Partitions to seek to their end: retention has deleted the records at our position."""
        self._go_on_at_s = 0.0
        self._loop_log = LimitedLog(log)
        """For the event loop: ``_log`` is the thread's."""

    async def follow(self, tenant: str) -> bool:
        """Read a tenant's chunks; returns whether ``leave`` must be called. Waits until chunks written from now on are
        read, but not for longer than a second."""
        followed = self._followed.get(tenant)
        if followed is None or (followed.ready.done() and not followed.ready.result()):
            followed = self._begin(tenant)
        if followed is None:
            return False
        followed.streams += 1
        if not followed.ready.done():
            await asyncio.wait((followed.ready,), timeout=_FOLLOW_TIMEOUT_S)
        return True

    def leave(self, tenant: str) -> None:
        """End one stream of this tenant. Its chunks are read for a while longer, for the next stream."""
        followed = self._followed.get(tenant)
        if followed is not None and followed.streams > 0:
            followed.streams -= 1
            followed.idle_since_s = monotonic()
        self._drop_idle(monotonic() - _KEPT_S)

    def _begin(self, tenant: str) -> _Followed | None:
        if len(self._followed) >= MOST_TENANTS:
            self._drop_idle(monotonic())
        if len(self._followed) >= MOST_TENANTS or self._loop is None:
            self._loop_log.warning("chunks_not_read", tenant=tenant, reason="too many tenants")
            return None
        before = self._followed.get(tenant)
        followed = _Followed(self._loop.create_future(), 0 if before is None else before.streams)
        self._followed[tenant] = followed
        self._orders.put((tenant, followed.ready))
        return followed

    def _drop_idle(self, since_s: float) -> None:
        idle = [name for name, one in self._followed.items() if not one.streams and one.idle_since_s <= since_s]
        for tenant in idle:
            del self._followed[tenant]
            self._orders.put((tenant, None))

    def _read_until_stopped(self) -> None:
        consumer = self._make_consumer()
        try:
            while not self._stopping.is_set():
                self._obey(consumer)
                if self._assigned:
                    self._read(consumer)
        finally:
            consumer.close()

    def _obey(self, consumer: Consumer) -> None:
        try:
            tenant, ready = self._orders.get(block=not self._assigned, timeout=_IDLE_POLL_S)
        except Empty:
            return
        topic = chunks_topic(tenant)
        if ready is None:
            self._unassign(consumer, topic)
            return
        try:
            if topic not in self._assigned:
                self._assign(consumer, topic)
            is_read = True
        except (FairlaneError, KafkaException) as error:
            self._log.warning("chunks_not_read", tenant=tenant, reason=reason_of(error))
            is_read = False
        self._call(_set, ready, is_read)

    def _assign(self, consumer: Consumer, topic: str) -> None:
        partitions = partitions_of(consumer, topic, _CALL_TIMEOUT_S)
        if not partitions:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        ends = {number: end_of(consumer, topic, number, monotonic() + _CALL_TIMEOUT_S) for number in partitions}
        starts = [TopicPartition(topic, number, end) for number, end in ends.items()]
        consumer.incremental_assign(starts)
        self._assigned[topic] = starts

    def _unassign(self, consumer: Consumer, topic: str) -> None:
        gone = self._assigned.pop(topic, None)
        self._passed = {place for place in self._passed if place[0] != topic}
        if gone:
            try:
                consumer.incremental_unassign(gone)
            except KafkaException as error:
                # Nobody wants the chunks that still arrive.
                self._log.warning("chunks_not_left", topic=topic, reason=reason_of(error))

    def _read(self, consumer: Consumer) -> None:
        first = consumer.poll(_POLL_S)
        messages = [] if first is None else [first, *consumer.consume(_MAX_RECORDS, 0)]
        if chunks := [chunk for chunk in map(self._take, messages) if chunk is not None]:
            self._give(chunks)
        if self._passed and monotonic() >= self._go_on_at_s:
            self._go_on(consumer)

    def _go_on(self, consumer: Consumer) -> None:
        """Seek to the end where retention has deleted the records at our position."""
        for topic, partition in tuple(self._passed):
            try:
                consumer.seek(TopicPartition(topic, partition, OFFSET_END))
            except KafkaException as error:
                self._log.warning("chunk_position_not_known", topic=topic, reason=reason_of(error))
                self._go_on_at_s = monotonic() + _AGAIN_S
            else:
                self._passed.discard((topic, partition))

    def _take(self, message: Message) -> Chunk | None:
        error, topic, key = message.error(), message.topic() or "", message.key()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            # The topic may have been unassigned meanwhile.
            if error.code() == KafkaError._AUTO_OFFSET_RESET and topic in self._assigned:
                self._passed.add((topic, message.partition() or 0))
            return None
        if key is None or not self._is_wanted(key.decode(errors="replace")):
            return None
        chunk = self._decoder.decode(message)
        return None if chunk is None else (tenant_of_chunks(topic), chunk)

    def _late(self, found: list[tuple[str, ReplyChunk]]) -> None:
        self._give([(tenant_of_chunks(topic), chunk) for topic, chunk in found])


def _set(future: "asyncio.Future[bool]", is_read: bool) -> None:
    if not future.done():
        future.set_result(is_read)
