"""A Kafka in memory behind the seams of the client: the test decides what is acknowledged and answered, and when."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from fairlane.client.connector import KafkaConnector, KafkaHeaders
from fairlane.client.requests import RequestFields
from fairlane.records import InferenceReply, ReplyChunk
from fairlane.schema_files import default_codec
from fairlane.skipping_consumer import SkippingConsumer

DeliveryReport = Callable[[KafkaError | None, Message], None]

MODEL_FIELDS: RequestFields = {"model": "m", "prompt": "hello"}


def reply_message(
    reply: InferenceReply, topic: str = "replies.acme", offset: int = 7, headers: KafkaHeaders | None = None
) -> Message:
    """The record of a reply."""
    key, value = reply.request_id.encode(), default_codec().encode(reply)
    return Message(topic=topic, partition=0, offset=offset, key=key, value=value, headers=headers)


def chunk_message(chunk: ReplyChunk, topic: str = "chunks.acme") -> Message:
    """The record of a chunk."""
    return Message(
        topic=topic, partition=0, offset=7, key=chunk.request_id.encode(), value=default_codec().encode(chunk)
    )


def error_message(code: int, *, fatal: bool = False, topic: str = "replies.acme") -> Message:
    """What a consumer's poll returns for an error."""
    return Message(topic=topic, partition=0, error=KafkaError(code, "says the broker", fatal))


@dataclass
class Sent:
    """One call of produce."""

    topic: str
    value: bytes
    key: bytes
    report: DeliveryReport
    headers: KafkaHeaders = field(default_factory=list)


class FakeProducer(Producer):
    """Keeps what was produced; `acknowledge` and `refuse` make the reports that the next poll or flush serves."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.refuse_with: Exception | None = None
        self.acknowledge_at_once = False
        self.poll_error: Exception | None = None
        self._lock = threading.Lock()
        self._open: deque[Sent] = deque()
        self._reports: deque[tuple[Sent, KafkaError | None]] = deque()
        self._woken = threading.Condition()

    def produce(  # type: ignore[override]  # as the client calls it
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None:
        if self.refuse_with is not None:
            raise self.refuse_with
        sent = Sent(topic, value, key, on_delivery, headers)
        with self._lock:
            self.sent.append(sent)
            self._open.append(sent)
        if self.acknowledge_at_once:
            self.acknowledge()

    def acknowledge(self, count: int = 1) -> None:
        self._report(count, None)

    def refuse(self, code: int) -> None:
        self._report(1, KafkaError(code, "refused by the broker"))

    def poll(self, timeout: float = -1) -> int:
        if self.poll_error is not None:
            raise self.poll_error
        if not self._serve():
            with self._woken:
                self._woken.wait(min(timeout, 0.01))
            return self._serve()
        return 1

    def flush(self, timeout: float = -1) -> int:
        self._serve()
        return len(self._open)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        self._report(len(self._open), KafkaError(KafkaError._PURGE_QUEUE, "purged"))

    def _report(self, count: int, error: KafkaError | None) -> None:
        with self._lock:
            for _ in range(count):
                self._reports.append((self._open.popleft(), error))
        with self._woken:
            self._woken.notify_all()

    def _serve(self) -> int:
        served = 0
        while True:
            with self._lock:
                if not self._reports:
                    return served
                sent, error = self._reports.popleft()
            sent.report(error, Message(topic=sent.topic, partition=0, offset=served, key=sent.key))
            served += 1


class FakeConsumer(SkippingConsumer):
    """Delivers what `push` was given. `partitions` None: the topic does not exist; an exception: nobody answers."""

    def __init__(self) -> None:
        self.partitions: int | Exception | None = 1
        self.end = 5
        self.assigned: list[TopicPartition] = []
        self.sought: list[TopicPartition] = []
        self.closed = False
        self.steps: list[str] = []
        self._messages: deque[Message] = deque()
        self._arrived = threading.Condition()

    def push(self, *messages: Message) -> None:
        with self._arrived:
            self._messages.extend(messages)
            self._arrived.notify_all()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self.steps.append("list")
        if isinstance(self.partitions, Exception):
            raise self.partitions
        if self.partitions is None:
            unknown = SimpleNamespace(error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), partitions={})
            return SimpleNamespace(topics={topic: unknown})
        known = SimpleNamespace(error=None, partitions=dict.fromkeys(range(self.partitions)))
        return SimpleNamespace(topics={topic: known})

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        self.steps.append("watermarks")
        return 0, self.end

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.steps.append("assign")
        self.assigned.extend(partitions)

    def seek(self, partition: TopicPartition) -> None:
        self.sought.append(partition)

    def poll(self, timeout: float = -1) -> Message | None:
        with self._arrived:
            if not self._messages:
                self._arrived.wait(timeout)
            return self._messages.popleft() if self._messages else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        with self._arrived:
            return [self._messages.popleft() for _ in range(min(num_messages, len(self._messages)))]

    def close(self) -> None:
        self.closed = True


class FakeMember(FakeConsumer):
    """A consumer whose group consists of itself, as the next poll says; its commits block while `answers` is not set.

    Nobody may wait for a broker in a callback of the group, nor is anything read that was not assigned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.commits: list[list[tuple[int, int]]] = []
        self.async_commits = 0
        self.commit_error: KafkaError | None = None
        self.positions_error: KafkaError | None = None
        self.asked = 0
        """How often where the group left off."""
        self.callbacks: dict[str, Callable[..., None]] = {}
        self.rebalances = deque(["on_assign"])
        """The callbacks of the next poll, for the one partition."""
        self.is_in_callback = False
        self.topic = ""

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:  # type: ignore[override]  # as the client calls it
        self.callbacks = callbacks
        self.topic = topics[0]

    def poll(self, timeout: float = -1) -> Message | None:
        is_rebalanced = bool(self.rebalances)
        self.is_in_callback = True
        while self.rebalances:
            self.callbacks[self.rebalances.popleft()](self, [TopicPartition(self.topic, 0)])
        self.is_in_callback = False
        return None if is_rebalanced or not self.assigned else super().poll(timeout)

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        assert not self.is_in_callback
        if self.positions_error is not None:
            raise KafkaException(self.positions_error)
        self.asked += 1
        return partitions

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        assert not self.is_in_callback
        return super().get_watermark_offsets(partition, timeout)

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = partitions

    def commit(  # type: ignore[override]  # as the client calls it
        self, *, offsets: list[TopicPartition], asynchronous: bool
    ) -> list[TopicPartition]:
        if asynchronous:
            self.async_commits += 1
            return []
        self.answers.wait(30)
        if self.commit_error is not None:
            raise KafkaException(self.commit_error)
        self.commits.append([(offset.partition, offset.offset) for offset in offsets])
        return offsets


@dataclass
class FakeConnector(KafkaConnector):
    """Hands out one producer, one consumer of replies, and consumers of chunks, the last of which is kept."""

    made_producer: FakeProducer = field(default_factory=FakeProducer)
    made_consumer: FakeConsumer = field(default_factory=FakeConsumer)
    chunks: FakeConsumer = field(default_factory=FakeConsumer)
    chunk_readers: int = 0

    def producer(self, max_messages: int, max_bytes: int) -> FakeProducer:
        self.made_consumer.steps.append("producer")
        return self.made_producer

    def reader(self, group_id: str) -> FakeConsumer:
        return self.made_consumer

    def chunk_reader(self, group_id: str) -> FakeConsumer:
        self.chunk_readers += 1
        return self.chunks

    def last_error(self) -> str | None:
        return None


def no_broker() -> KafkaException:
    """What a call raises that nobody answered."""
    return KafkaException(KafkaError(KafkaError._TRANSPORT, "nobody there"))
