"""Requests of one tenant and the replies to them, each with the time at which the broker appended it."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Self

from confluent_kafka import Consumer, Producer, TopicPartition

from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.records import InferenceReply, InferenceRequest
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

REQUEST_TIMEOUT_MS = 3_600_000
"""So long that nothing of a backlog is refused: of an engine that has not run a full batch yet nobody knows how fast it
is."""

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A final reply, and when it was appended."""

    reply: InferenceReply
    appended_at_ms: int


class Backlog:
    """Publishes requests all at once and collects what they are answered.

    with Backlog(settings, "acme") as backlog:
        answers = backlog.run(requests, timeout_s=60)
    """

    def __init__(self, settings: KafkaSettings, tenant: str) -> None:
        self._tenant = tenant
        self._codec = default_codec()
        self._producer = Producer(idempotent_producer(settings))
        self._consumer = Consumer(read_committed_consumer(settings, f"bench-{uuid.uuid4()}"))

    def __enter__(self) -> Self:
        topic = replies_topic(self._tenant)
        end = self._consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_TIMEOUT_S)[1]
        self._consumer.assign([TopicPartition(topic, 0, end)])
        return self

    def __exit__(self, *_error: object) -> None:
        self._consumer.close()

    def run(self, requests: Sequence[InferenceRequest], timeout_s: float) -> list[Answer]:
        """The answers in the order of the requests. Raises TimeoutError, or RuntimeError when one was not served."""
        for request in requests:
            value = self._codec.encode(request)
            self._producer.produce(requests_topic(self._tenant), value, key=request.request_id)
        if self._producer.flush(_TIMEOUT_S):
            raise TimeoutError("the requests could not be published")
        wanted = {request.request_id for request in requests}
        answers: dict[str, Answer] = {}
        deadline = monotonic() + timeout_s
        while len(answers) < len(wanted):
            if monotonic() > deadline:
                raise TimeoutError(f"{len(wanted) - len(answers)} replies did not come within {timeout_s:g} s")
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            reply = self._codec.decode_as(InferenceReply, message.value())
            if reply.request_id in wanted:
                if reply.outcome != "ok":
                    raise RuntimeError(f"a request was answered {reply.outcome} {reply.code}: {reply.message}")
                answers[reply.request_id] = Answer(reply, message.timestamp()[1])
        return [answers[request.request_id] for request in requests]
