"""Dead letters of a service: replies that its handler cannot handle, on its tenant's own topic."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane.client.group_member import ReadRecord
from fairlane.client.ports import LETTER_TIMEOUT_MS, ProducerPort
from fairlane.client.positions import MetadataSource, existing_partitions
from fairlane.cluster import reason_of
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers, letter_content
from fairlane.errors import Unavailable
from fairlane.names import dead_letter_replies_topic
from fairlane.records import InferenceReply, SourceCoordinate

# The producer gives up first, and says why.
_WRITE_TIMEOUT_S = LETTER_TIMEOUT_MS / 1_000 + 2.0
_POLL_S = 0.1


class HandlerFailedError(DeadLetterError):
    """A service's handler failed on this reply at every try."""


class UndecodableReplyError(DeadLetterError):
    """What stood on the reply topic is no reply."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record of a reply topic that a service cannot take. Of its content nothing is shown when this is printed.

    Attributes:
        record: the record as it came: ``topic``, ``partition``, ``offset``, ``timestamp_ms``, ``key``, ``value``.
        reply: the reply in it, which the handler failed on at every try; None in a record that is no reply.
        error: what the handler raised last; of a record that is no reply, an error that says why it is none.
    """

    record: ReadRecord
    reply: InferenceReply | None = field(repr=False)
    error: Exception = field(repr=False)


class LetterProducer(ProducerPort, MetadataSource, Protocol):
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
        self._signature = LetterWriter(f"{group}-{uuid4()}", group)

    def check(self, timeout_s: float) -> None:
        """Raises Unavailable when there is no such topic, it may not be used, or no broker answers."""
        try:
            existing_partitions(self._producer, self.topic, monotonic() + timeout_s)
        except KafkaException as error:
            raise Unavailable(f"no broker answers: {reason_of(error)}") from error

    def keep(self, letter: DeadLetter, tries: int) -> None:
        """Write a letter; a reply in it was tried ``tries`` times. Raises Unavailable when the topic does not take it.

        Of a handler's error only its class is told: its text may quote the reply."""
        if isinstance(letter.error, UndecodableReplyError):
            self._write(letter.record, letter.error, None)
        else:
            why = HandlerFailedError(f"{type(letter.error).__name__} at each of {tries} tries")
            self._write(letter.record, why, None if letter.reply is None else letter.reply.model)

    def close(self) -> None:
        """Give up what was not acknowledged in time; it was not taken for kept."""
        self._producer.purge()

    def _write(self, record: ReadRecord, why: DeadLetterError, model: str | None) -> None:
        outcome: list[KafkaError | None] = []

        def reported(failure: KafkaError | None, _message: Message) -> None:
            outcome.append(failure)

        where = SourceCoordinate(record.topic, record.partition, record.offset)
        headers = dead_letter_headers(
            where, record.timestamp_ms or None, why, self._signature, tenant=self._tenant, model=model
        )
        key, value, headers = letter_content(record.key, record.value or b"", (*headers, *record.trace))
        try:
            self._producer.produce(
                self.topic,
                value,
                key or b"",
                headers=list(headers),
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
