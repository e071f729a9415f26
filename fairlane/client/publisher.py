"""Publishes requests, retries and cancels, and handles delivery reports."""

import threading
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane import cloud_events
from fairlane.client.handle import Handle
from fairlane.client.open_handles import Attempts, OpenHandles, Retrier
from fairlane.client.ports import KafkaHeaders, ProducerPort, log
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.window import Window
from fairlane.clock import ClockMs
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import Backpressure, FairlaneError, PublishFailed
from fairlane.kafka_config import UNCERTAIN_DELIVERY_ERRORS
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest, SourceCoordinate
from fairlane.trace_context import TraceHeaders, current_trace


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked and encoded, with the headers of its record, ``trace`` among them."""

    request: InferenceRequest
    reply_to: str
    value: bytes
    headers: KafkaHeaders
    trace: TraceHeaders = ()


class Publisher:
    """The producer of one client. Thread-safe but for ``work``, which one thread calls.

    Args:
        topic: where the tenant's requests go.
        handles: the requests under way.
        window: what bounds them.
    """

    def __init__(
        self,
        producer: ProducerPort,
        codec: Codec,
        tenant: str,
        topic: str,
        handles: OpenHandles,
        window: Window,
        retrier: Retrier,
        clock: ClockMs,
    ) -> None:
        self._producer = producer
        self._codec = codec
        self._topic = topic
        self._handles = handles
        self._window = window
        self._retrier = retrier
        self._clock = clock
        self._canceller = Canceller(producer, codec, clock, tenant)
        self._lock = threading.Lock()
        # A request that is published again never stands behind its own cancellation.
        self._trying = threading.Lock()
        self._promise_lock = threading.Lock()
        self.submitted = 0
        self.published = 0
        self.publish_failed = 0

    def publish(self, prepared: Prepared, policy: RetryPolicy) -> Handle:
        """Hand a request to the producer. The caller holds room for it in the window, which passes on to the handle.

        Raises:
            PublishFailed: the producer refused it at once.
            Backpressure: the producer's own queue is full.
            ClientClosed, Unavailable: the client ended.
        """
        request, size = prepared.request, len(prepared.value)
        handle = Handle(
            request.request_id, self._topic, prepared.reply_to, self._clock(), self._promise_lock, self.cancel
        )
        handle.trace = prepared.trace
        if policy.tries > 1:
            # What may be sent again is kept until the reply is here, and so is its room.
            handle.attempts = Attempts(policy, request, prepared.headers, self._retrier.now_ms)
            handle.held_bytes = size
        handle.queued_bytes = size - handle.held_bytes
        try:
            self._handles.enter(handle)
        except FairlaneError:
            self._window.release(requests=1, buffered_bytes=size)
            raise
        try:
            self._produce(handle, prepared.value, prepared.headers)
        except BaseException as error:  # also KeyboardInterrupt: the room must not be lost with the caller
            handle.attempts = None
            self._release_queued(handle)
            self._handles.leave(handle)
            if isinstance(error, BufferError):
                raise Backpressure("the producer's queue is full") from None
            with self._lock:
                self.publish_failed += 1
            if isinstance(error, KafkaException):
                raise PublishFailed(handle.request_id, self._topic, reason_of(error)) from error
            raise
        with self._lock:
            self.submitted += 1
        return handle

    def cancel(self, handle: Handle) -> None:
        """See ``Handle.cancel``."""
        if not handle.cancellable:
            return
        self._handles.raise_if_ended()
        attempts = handle.attempts
        with self._trying:
            if attempts is None or not isinstance(attempts.ending, InferenceReply):
                # What is perhaps in the log is to be cancelled there, too; what was refused is not.
                self._canceller.cancel(handle)
            # Only now: what cannot be cancelled waits on for its try, and ends by that.
            ending = self._retrier.give_up(handle)
        if ending is not None:
            self.end(handle, ending)

    def work(self, timeout_s: float) -> None:
        """Serve delivery reports for up to ``timeout_s``, and publish again what is due."""
        self._producer.poll(timeout_s)
        for handle in self._retrier.take_due():
            self._publish_again(handle)

    def flush(self, timeout_s: float) -> int:
        """Wait until nothing is in the producer's queue; how much is after ``timeout_s``."""
        return self._producer.flush(timeout_s)

    def purge(self, timeout_s: float) -> None:
        """Give up what is in the producer's queue."""
        self._producer.purge()
        self._producer.flush(timeout_s)

    def end(self, handle: Handle, ending: InferenceReply | PublishFailed) -> None:
        """Give a handle what it ends with instead of another try."""
        if not self._handles.finish(handle, ending, self._clock()):
            handle.keep_published(None, None)  # the reply was there first: it is in the log
        elif isinstance(ending, PublishFailed):
            with self._lock:
                self.publish_failed += 1

    def _publish_again(self, handle: Handle) -> None:
        attempts = handle.attempts
        assert attempts is not None  # noqa: S101 - a mistake in this package, not of a caller
        request = attempts.request_at(self._retrier.now_ms)
        value = None if request is None else self._codec.encode(request)
        reason, is_full = None, False
        with self._trying:
            if not self._retrier.begin_try(handle):
                return  # cancelled meanwhile
            try:
                if value is None:
                    reason = "no time is left for another try"
                else:
                    self._produce(handle, value, attempts.headers)
            except BufferError:
                reason, is_full = "the producer's queue is full", True
            except KafkaException as error:
                reason = reason_of(error)
        if reason is None:
            return
        failure = PublishFailed(handle.request_id, self._topic, reason)
        if not (is_full and self._retrier.keeps_lost(handle, failure)):
            self.end(handle, failure)

    def _produce(self, handle: Handle, value: bytes, headers: KafkaHeaders) -> None:
        self._producer.produce(
            self._topic,
            value,
            handle.request_id.encode(),
            headers=headers,
            on_delivery=partial(self._on_delivery, handle),
        )

    def _release_queued(self, handle: Handle) -> None:
        """Give back the room of what was in the producer's queue, once."""
        with self._lock:
            queued_bytes, handle.queued_bytes = handle.queued_bytes, 0
        self._window.release(buffered_bytes=queued_bytes)

    def _on_delivery(self, handle: Handle, error: KafkaError | None, message: Message) -> None:
        # Runs inside the producer's poll or flush: an exception here would end the thread.
        self._release_queued(handle)
        if error is None:
            with self._lock:
                self.published += 1
            self._handles.published(handle)
            where = SourceCoordinate(self._topic, message.partition() or 0, message.offset() or 0)
            handle.keep_published(where, self._clock())
            return
        uncertain = error.code() in UNCERTAIN_DELIVERY_ERRORS
        failure = PublishFailed(handle.request_id, self._topic, error.str(), uncertain=uncertain)
        if not (uncertain and self._retrier.keeps_lost(handle, failure)):
            self.end(handle, failure)


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
