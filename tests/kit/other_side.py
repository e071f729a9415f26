"""The other side of a tenant's topics, played by a test: reads what a client publishes, writes chunks and replies."""

import time
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import chunks_topic, replies_topic, requests_topic
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest, Output, ReplyChunk
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane.trace_context import TraceHeaders, trace_headers
from fairlane_server.kafka.settlement import reply_record

WAIT_S = 20


def create_topics(servers: str, *names: str) -> None:
    """With one partition each."""
    admin = AdminClient({"bootstrap.servers": servers})
    topics = [NewTopic(name, num_partitions=1, replication_factor=1) for name in names]
    for future in admin.create_topics(topics, request_timeout=WAIT_S).values():
        future.result(WAIT_S)


class OtherSide:
    """Stands for the whole pipeline of one tenant. For one thread."""

    def __init__(self, servers: str, tenant: str) -> None:
        settings = KafkaSettings(kafka_bootstrap_servers=servers)
        self.tenant = tenant
        self._consumer = Consumer(read_committed_consumer(settings, f"{tenant}-other-side"))
        self._consumer.assign([TopicPartition(requests_topic(tenant), 0, OFFSET_BEGINNING)])
        self._producer = Producer(idempotent_producer(settings) | {"linger.ms": 0})
        self._traces: dict[str, TraceHeaders] = {}

    def request(self) -> InferenceRequest:
        """The next record of the client, which is a request."""
        record = self._next()
        assert isinstance(record, InferenceRequest)
        return record

    def cancellation(self) -> CancelRequest:
        """The next record of the client, which is a cancellation."""
        record = self._next()
        assert isinstance(record, CancelRequest)
        return record

    def poll(self, timeout_s: float) -> InferenceRequest | CancelRequest | None:
        """The next record of the client; None when there is none within ``timeout_s``."""
        message = self._consumer.poll(timeout_s)
        if message is None or message.error() is not None:
            return None
        record = default_codec().decode_any((InferenceRequest, CancelRequest), message.value())
        self._traces[record.request_id] = trace_headers(message.headers())
        return record

    def chunk(self, request_id: str, seq: int, text: str, *, attempt: int = 1, last: bool = False) -> None:
        """Write a chunk, without waiting until it is in the log."""
        record = ReplyChunk(request_id, self.tenant, 1, attempt, seq, text, last)
        self._producer.produce(chunks_topic(self.tenant), default_codec().encode(record), request_id)
        self._producer.poll(0)

    def reply(self, request_id: str, text: str | None = None, outcome: str = "ok") -> None:
        """Write the final reply, behind all that was written so far."""
        output = None if text is None else Output(text=text)
        self.write(InferenceReply(request_id, self.tenant, outcome, output=output))

    def write(self, record: InferenceReply, topic: str | None = None) -> None:
        """Write a reply made elsewhere, behind all that was written so far, by default to the tenant's own topic."""
        assert self._producer.flush(WAIT_S) == 0
        value, trace = default_codec().encode(record), self._traces.get(record.request_id, ())
        made = reply_record(topic or replies_topic(self.tenant), record, value, trace)
        self._producer.produce(made.topic, made.value, made.key, headers=[*made.headers])
        assert self._producer.flush(WAIT_S) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    def _next(self) -> InferenceRequest | CancelRequest:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if (record := self.poll(0.1)) is not None:
                return record
        raise AssertionError("nothing was published")
