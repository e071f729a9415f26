"""Look-up of committed replies: the recorder's table gives their log position, the reply topic their content."""

import asyncio
import threading

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from fairlane import metrics
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_clients import KafkaConsumer
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import dispatcher_archive_group
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.settings import Settings
from fairlane.skipping_consumer import problem_of
from fairlane_server.postgres.connection import ReconnectingConnection
from stream_processors.dispatcher.deduplication.stage import ReplyGoneError, ReplyUnknownError

log = get_logger(__name__)

_APPLICATION = "fairlane-dispatcher"
_READER = "archive"
_READ_TIMEOUT_S = 2.0
_QUERY_TIMEOUT_S = 2.0
_WHERE = """
SELECT reply_topic, reply_partition, reply_offset, outcome, code, message FROM results
WHERE request_id = %s AND tenant = %s AND source_topic = %s AND source_partition = %s AND source_offset = %s
"""


class KafkaReplyArchive:
    """Finds the committed reply to a request by the request's source coordinate.

    One look-up at a time, on an executor thread: duplicates are rare and must not slow down other requests.
    """

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._kept = ReconnectingConnection(settings.postgres_dsn.get_secret_value(), _APPLICATION, _QUERY_TIMEOUT_S)
        self._codec = codec
        self._settings = settings
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        return await asyncio.get_running_loop().run_in_executor(None, self._find, tenant, request_id, source)

    def close(self) -> None:
        with self._lock:
            self._reset()

    def _find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        with self._lock:
            try:
                found = self._place(tenant, request_id, source)
                if found is None:
                    return None
                place, recorded = found
                reply = self._read(place)
            except Exception as error:
                # Any error: the caller retries.
                log.warning("reply_lookup_failed", tenant=tenant, request_id=request_id, error=type(error).__name__)
                self._reset()
                raise ReplyUnknownError(type(error).__name__) from error
        if reply is None and recorded.outcome != Outcome.REJECTED:
            raise ReplyGoneError
        # A rejection has no output: the table has all of it.
        return reply or recorded

    def _place(
        self, tenant: str, request_id: str, source: SourceCoordinate
    ) -> tuple[SourceCoordinate, InferenceReply] | None:
        """The reply's log position, and the reply as far as the table records it, for when the log has lost it."""
        with self._kept.transaction(tenant) as connection:
            arguments = (request_id, tenant, source.topic, source.partition, source.offset)
            row = connection.execute(_WHERE, arguments).fetchone()
        if row is None:
            return None
        topic, partition, offset, outcome, code, message = row
        left = InferenceReply(request_id, tenant, outcome, code=code, message=message or "", source=source)
        return SourceCoordinate(topic, partition, offset), left

    def _read(self, place: SourceCoordinate) -> InferenceReply | None:
        """The reply at this log position; None when retention removed it or it cannot be decoded.

        Raises KafkaException when the broker does not return it within ``_READ_TIMEOUT_S``.
        """
        if self._consumer is None:
            group = dispatcher_archive_group(self._settings.group_prefix)
            self._consumer = KafkaConsumer(read_committed_consumer(self._settings, group))
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
