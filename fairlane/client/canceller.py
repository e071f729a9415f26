"""Publishes cancels."""

import threading
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane import cloud_events
from fairlane.client.handle import Handle
from fairlane.client.ports import ProducerPort, log
from fairlane.client.tracing import current_trace
from fairlane.clock import ClockMs
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import Backpressure, PublishFailed
from fairlane.records import CancelRequest


class Canceller:
    """Thread-safe. The handle remembers that a cancellation was sent, so that it is sent once."""

    def __init__(self, producer: ProducerPort, codec: Codec, clock: ClockMs, tenant: str) -> None:
        self._producer = producer
        self._codec = codec
        self._clock = clock
        self._tenant = tenant
        self._lock = threading.Lock()

    def cancel(self, handle: Handle) -> None:
        """Hand the cancellation to the producer, unless one is under way or the reply is here.

        It has the key of its request and goes through the same producer, so it stands behind it in the same partition.
        It carries the trace of whoever cancels; where that is nobody's, as of a stream that was dropped, the request's.

        Raises:
            PublishFailed: the producer refused it. Trying again is allowed.
            Backpressure: the producer's own queue is full. Trying again is allowed.
        """
        with self._lock:
            if not handle.cancellable:
                return
            handle.cancel_sent_at_ms = self._clock()
        request_id = handle.request_id
        try:
            self._producer.produce(
                handle.topic,
                self._codec.encode(CancelRequest(request_id)),
                request_id.encode(),
                headers=[*cloud_events.of_cancellation(self._tenant, request_id), *(current_trace() or handle.trace)],
                on_delivery=partial(self._on_delivery, handle),
            )
        except BufferError:
            handle.cancel_sent_at_ms = None
            raise Backpressure("the producer's queue is full") from None
        except KafkaException as error:
            handle.cancel_sent_at_ms = None
            raise PublishFailed(request_id, handle.topic, reason_of(error), what="cancellation of request") from error

    def _on_delivery(self, handle: Handle, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            handle.cancel_sent_at_ms = None
            log.warning(
                "cancel_not_published request_id=%s topic=%s reason=%s", handle.request_id, handle.topic, error.str()
            )
