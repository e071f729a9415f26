"""The dead letters of a service: replies that its handler cannot take, on a topic of its tenant's own."""

from time import monotonic
from typing import Protocol
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane import metrics
from fairlane.client.group_member import ReadRecord, UndecodableReply
from fairlane.client.positions import MetadataSource, existing_partitions
from fairlane.client.seams import LETTER_TIMEOUT_MS, ProducerSeam
from fairlane.cluster import reason_of
from fairlane.dead_letters import DeadLetterError, Signature, dead_letter_headers
from fairlane.errors import Unavailable
from fairlane.names import dead_letter_replies_topic
from fairlane.records import InferenceReply, SourceCoordinate

DEAD_LETTER = "dead_letter"

# The producer gives up first, and says why.
_WRITE_TIMEOUT_S = LETTER_TIMEOUT_MS / 1_000 + 2.0
_POLL_S = 0.1


class HandlerFailedError(DeadLetterError):
    """A service's handler failed on this reply at every try."""


class UndecodableReplyError(DeadLetterError):
    """What stood on the reply topic is no reply."""


class LetterProducer(ProducerSeam, MetadataSource, Protocol):
    """An idempotent producer that knows which topics there are."""


class ReplyLetters:
    """Writes dead letters, each in the log before the call returns. For one thread at a time.

    Args:
        producer: owned from now on.
        tenant: whose service this is.
        group: the consumer group that could not handle them.
    """

    def __init__(self, producer: LetterProducer, tenant: str, group: str) -> None:
        self.topic = dead_letter_replies_topic(tenant)
        self._producer = producer
        self._tenant = tenant
        self._signature = Signature(f"{group}-{uuid4()}", group)

    def check(self, timeout_s: float) -> None:
        """Raises Unavailable when there is no such topic, it may not be used, or no broker answers."""
        try:
            existing_partitions(self._producer, self.topic, monotonic() + timeout_s)
        except KafkaException as error:
            raise Unavailable(f"no broker answers: {reason_of(error)}") from error

    def handler_failed(self, record: ReadRecord, reply: InferenceReply, error: Exception, tries: int) -> None:
        """Keep a reply. Of the error only its class is told: its text may quote the reply.

        Raises Unavailable when the topic does not take it."""
        why = HandlerFailedError(f"{type(error).__name__} at each of {tries} tries")
        self._write(record, why, reply.model)

    def undecodable(self, bad: UndecodableReply) -> None:
        """Keep a record that is no reply. Raises Unavailable when the topic does not take it."""
        self._write(bad.record, UndecodableReplyError(bad.problem), None)

    def close(self) -> None:
        """Give up what was not acknowledged in time; it was not taken for kept."""
        self._producer.purge()

    def _write(self, record: ReadRecord, why: DeadLetterError, model: str | None) -> None:
        outcome: list[KafkaError | None] = []

        def reported(failure: KafkaError | None, _message: Message) -> None:
            outcome.append(failure)

        where = SourceCoordinate(record.topic, record.partition, record.offset)
        headers = dead_letter_headers(
            where, record.timestamp_ms, why, self._signature, tenant=self._tenant, model=model
        )
        try:
            self._producer.produce(
                self.topic,
                record.value or b"",
                record.key or b"",
                headers=[*headers, *record.trace],
                on_delivery=reported,
            )
        except (BufferError, KafkaException) as error:
            raise Unavailable(f"{self.topic}: {reason_of(error)}") from error
        deadline = monotonic() + _WRITE_TIMEOUT_S
        while not outcome and monotonic() < deadline:
            self._producer.poll(_POLL_S)
        if not outcome:
            raise Unavailable(f"{self.topic}: no answer within {_WRITE_TIMEOUT_S:g} s")
        if outcome[0] is not None:
            raise Unavailable(f"{self.topic}: {outcome[0].str()}")
        metrics.REPLIES_SERVED.labels(topic=record.topic, result=DEAD_LETTER).inc()
