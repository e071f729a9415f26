"""Settled replies: where they stand is in the recorder's projection, what they say is in the log."""

import asyncio
import threading

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from fairlane import metrics
from fairlane.codec import Codec, DecodeError
from fairlane.kafka import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.settings import Settings
from fairlane.unreadable import problem_of
from fairlane_server.postgres.connection import KeptConnection
from stream_processors.dispatcher.repeats import ReplyGoneError, ReplyUnknownError

log = get_logger(__name__)

_APPLICATION = "fairlane-dispatcher"
_READER = "archive"
_READ_TIMEOUT_S = 2.0
_QUERY_TIMEOUT_S = 2.0
_WHERE = """
SELECT reply_topic, reply_partition, reply_offset, outcome, code, message FROM results
WHERE request_id = %s AND tenant = %s AND source_topic = %s AND source_partition = %s AND source_offset = %s
"""


class LoggedReplies:
    """Finds the committed reply to a request by the place the request stood at.

    One look-up at a time, on a thread of its own: repeated ids are rare, and must not cost anybody else anything.
    """

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._kept = KeptConnection(settings.postgres_dsn.get_secret_value(), _APPLICATION, _QUERY_TIMEOUT_S)
        self._codec = codec
        self._settings = settings
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        return await asyncio.get_running_loop().run_in_executor(None, self._find, tenant, request_id, source)

    def close(self) -> None:
        """Let go of both connections."""
        with self._lock:
            self._reset()

    def _find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        with self._lock:
            try:
                found = self._place(tenant, request_id, source)
                if found is None:
                    return None
                place, outcome = found
                return self._read(place) or _refusal(outcome)
            except ReplyGoneError:
                raise
            except Exception as error:
                # Of whatever kind: who asks must go on, and ask again.
                log.warning("reply_lookup_failed", tenant=tenant, request_id=request_id, error=type(error).__name__)
                self._reset()
                raise ReplyUnknownError(type(error).__name__) from error

    def _place(
        self, tenant: str, request_id: str, source: SourceCoordinate
    ) -> tuple[SourceCoordinate, InferenceReply] | None:
        """Where the reply stands, and what is left of it when it stands there no more."""
        with self._kept.transaction(tenant) as connection:
            arguments = (request_id, tenant, source.topic, source.partition, source.offset)
            row = connection.execute(_WHERE, arguments).fetchone()
        if row is None:
            return None
        topic, partition, offset, outcome, code, message = row
        left = InferenceReply(request_id, tenant, outcome, code=code, message=message or "", source=source)
        return SourceCoordinate(topic, partition, offset), left

    def _read(self, place: SourceCoordinate) -> InferenceReply | None:
        """The reply at its place in the log; None when retention removed it meanwhile, or it cannot be read there.
        Raises KafkaException when it does not come."""
        if self._consumer is None:
            group = f"{self._settings.group_prefix}.dispatcher.archive"
            self._consumer = Consumer(read_committed_consumer(self._settings, group))
        self._consumer.assign([TopicPartition(place.topic, place.partition, place.offset)])
        message = self._consumer.poll(_READ_TIMEOUT_S)
        if message is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        error = message.error()
        if error is not None and (error.code() == KafkaError._AUTO_OFFSET_RESET or problem_of(error) is not None):
            return None
        if error is not None:
            raise KafkaException(error)
        if (message.topic(), message.partition(), message.offset()) != (place.topic, place.partition, place.offset):
            return None
        try:
            return self._codec.decode_as(InferenceReply, message.value())
        except DecodeError as problem:
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=problem.problem).inc()
            log.error("reply_unreadable", topic=place.topic, partition=place.partition, offset=place.offset)
            return None

    def _reset(self) -> None:
        self._kept.close()
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = None


def _refusal(left: InferenceReply) -> InferenceReply:
    """A refusal says all it has to say without its record. Raises ReplyGoneError for anything else."""
    if left.outcome != Outcome.REJECTED:
        raise ReplyGoneError
    return left
