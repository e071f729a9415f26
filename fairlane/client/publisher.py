"""Publication, retries, cancellation and settlement of a client's requests."""

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane import cloud_events
from fairlane.client.connector import KafkaHeaders, log
from fairlane.client.handle import BaseHandle, HandleT
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.window import Window
from fairlane.clock import ClockMs
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import AnsweredElsewhere, Backpressure, FairlaneError, PublishFailed
from fairlane.frozen import frozen_dataclass
from fairlane.kafka_config import UNCERTAIN_DELIVERY_ERRORS
from fairlane.names import backfill_topic, requests_topic
from fairlane.records import CancelRequest, Feedback, InferenceReply, InferenceRequest, SourceCoordinate
from fairlane.trace_context import TraceHeaders, current_trace

_FEEDBACK = "feedback on request"
CONFIRM_TIMEOUT_S = 60.0
"""Above the delivery timeout of the producer: what is not reported by then never is."""


@frozen_dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request that was checked and encoded, with the headers of its record, ``trace`` among them."""

    request: InferenceRequest
    reply_to: str
    value: bytes
    headers: KafkaHeaders
    trace: TraceHeaders = ()


@dataclass(slots=True)
class Attempts:
    """State of a request that may be published again.

    Attributes:
        ending: until its next try begins, what its handle gets if there is none; None while it is under way.
        due_ms: when that try is, by the clock of :class:`OpenHandles`.
        lost: whether the latest publication was not acknowledged, and will not be.
    """

    policy: RetryPolicy
    request: InferenceRequest
    headers: KafkaHeaders
    began_ms: int
    tries: int = 1
    ending: InferenceReply | PublishFailed | None = None
    due_ms: int = 0
    lost: bool = False

    def request_at(self, now_ms: int) -> InferenceRequest | None:
        """The request with what is left of its time: its deadline counts from the broker's receipt, and stays where it
        was. None when nothing is left."""
        timeout_ms = self.request.timeout_ms
        if timeout_ms is None:
            return self.request
        left_ms = timeout_ms - (now_ms - self.began_ms)
        return replace(self.request, timeout_ms=left_ms) if left_ms > 0 else None


class OpenHandles:
    """Handles without a result, by request id, and when which of them is published again. Thread-safe.

    Removing a handle gives back its room: one place in flight, and the bytes that it holds until it is over.

    Args:
        reply_topic: the one whose replies come here.
        window: the room is taken from it; its ``max_in_flight`` bounds this table.
        clock: never goes back.
        chance: a random number in [0, 1).
    """

    def __init__(self, reply_topic: str, window: Window, clock: ClockMs, chance: Callable[[], float]) -> None:
        self._reply_topic = reply_topic
        self._window = window
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._open: dict[str, list[BaseHandle]] = {}
        self._ended: FairlaneError | None = None
        self._order = count()
        self._due: list[tuple[int, int, BaseHandle]] = []
        self._retries_closed = False
        self.answered = 0
        self.retried = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        """Number of ids."""
        return len(self._open)

    @property
    def now_ms(self) -> int:
        """By the clock of the retries."""
        return self._clock()

    def raise_if_ended(self) -> None:
        """Raises what ``end`` was given."""
        if self._ended is not None:
            raise self._ended

    def end(self, error: FairlaneError) -> None:
        """Take none in any more; the first error is the one that is raised for it."""
        with self._lock:
            self._ended = self._ended or error
        self._window.close(error)

    def enter(self, handle: BaseHandle) -> None:
        """Take it in. Raises what ``end`` was given."""
        with self._lock:
            self.raise_if_ended()
            self._open.setdefault(handle.request_id, []).append(handle)
        if handle.reply_to != self._reply_topic:
            # It stays in the table until it is published, so that it fails with the client if the client fails.
            handle.replied.break_with(AnsweredElsewhere(handle.request_id, handle.reply_to))

    def leave(self, handle: BaseHandle) -> bool:
        """Remove it and release its room; False if it was already removed."""
        with self._lock:
            same_id = self._open.get(handle.request_id, [])
            if handle not in same_id:
                return False
            same_id.remove(handle)
            if not same_id:
                del self._open[handle.request_id]
        self._give_back([handle])
        return True

    def finish(self, handle: BaseHandle, ending: InferenceReply | PublishFailed, now_ms: int) -> bool:
        """Remove it and set its result; False if it was already removed."""
        if not self.leave(handle):
            return False
        if isinstance(ending, InferenceReply):
            with self._lock:
                self.answered += 1
            handle.keep_reply(ending, now_ms)
        else:
            handle.fail(ending)
        return True

    def published(self, handle: BaseHandle) -> None:
        """It is in the log: one that is answered elsewhere is over."""
        if handle.reply_to != self._reply_topic:
            self.leave(handle)

    def settle(self, reply: InferenceReply, received_at_ms: int) -> None:
        """A reply came: give it to the handles of its id but those that are published again after it."""
        with self._lock:
            settled: list[BaseHandle] = []
            kept: list[BaseHandle] = []
            for handle in self._open.pop(reply.request_id, ()):
                (kept if self._waits_after(handle, reply) else settled).append(handle)
            if kept:
                self._open[reply.request_id] = kept
            for handle in settled:
                if handle.attempts is not None:
                    handle.attempts.ending = None
            self.answered += len(settled)
        # The room first, so that it is free when the callbacks of the reply run.
        self._give_back(settled)
        for handle in settled:
            if handle.attempts is not None and handle.attempts.lost:
                handle.keep_published(None, None)  # and yet it is in the log
            handle.keep_reply(reply, received_at_ms)

    def fail_all(self, error: FairlaneError) -> None:
        """Fail all open handles with this error."""
        with self._lock:
            handles = [handle for same_id in self._open.values() for handle in same_id]
            self._open.clear()
        self._give_back(handles)
        for handle in handles:
            handle.fail(error)

    def keeps_lost(self, handle: BaseHandle, failure: PublishFailed) -> bool:
        """Whether this failure is not the end of the request: it is published again."""
        with self._lock:
            keeps = self._waits_after(handle, failure)
            if handle.attempts is not None:
                handle.attempts.lost = keeps
            return keeps

    def take_due(self) -> list[BaseHandle]:
        """Those whose next try is due, for ``begin_try``; each is returned once."""
        if not self._due:
            return []
        taken, over = [], []
        with self._lock:
            now_ms = self._clock()
            while self._due and self._due[0][0] <= now_ms:
                due_ms, _, handle = heapq.heappop(self._due)
                attempts = handle.attempts
                # A handle that was answered or given up meanwhile stays in the heap until its time.
                if attempts is None or attempts.ending is None or attempts.due_ms != due_ms:
                    continue
                if handle.over:
                    attempts.ending = None
                    over.append(handle)
                else:
                    taken.append(handle)
        for handle in over:
            handle.keep_published(None, None)  # its reply came when it was taken for lost: it is in the log
        return taken

    def begin_try(self, handle: BaseHandle) -> bool:
        """Count one more try; False when the handle does not wait for one any more."""
        attempts = handle.attempts
        with self._lock:
            if attempts is None or attempts.ending is None:
                return False
            attempts.ending = None
            attempts.tries += 1
            attempts.lost = False
            self.retried += 1
            return True

    def give_up(self, handle: BaseHandle) -> InferenceReply | PublishFailed | None:
        """Allow no more tries. Returns the result if the handle waited for one, else None."""
        attempts = handle.attempts
        if attempts is None:
            return None
        with self._lock:
            ending, attempts.ending = attempts.ending, None
            return ending

    def close_retries(self) -> list[BaseHandle]:
        """Allow no more tries of any handle. Returns those that waited for one."""
        with self._lock:
            self._retries_closed = True
            waiting = [handle for _, _, handle in self._due]
            self._due = []
        return waiting

    def _waits_after(self, handle: BaseHandle, ending: InferenceReply | PublishFailed) -> bool:
        """With the lock held: whether the handle is published again, or waits for that already."""
        attempts = handle.attempts
        if attempts is None:
            return False
        elapsed_ms, chance = self._clock() - attempts.began_ms, self._chance()
        tries, timeout_ms = attempts.tries, attempts.request.timeout_ms
        if isinstance(ending, InferenceReply):
            wait_ms = attempts.policy.wait_after_refusal_ms(ending, tries, elapsed_ms, timeout_ms, chance)
        else:
            wait_ms = attempts.policy.wait_after_lost_ms(tries, elapsed_ms, timeout_ms, chance)
        if wait_ms is None or self._retries_closed or handle.over or handle.cancel_sent_at_ms is not None:
            return False
        if attempts.ending is None:
            attempts.ending = ending
            attempts.due_ms = self._clock() + wait_ms
            heapq.heappush(self._due, (attempts.due_ms, next(self._order), handle))
        return True

    def _give_back(self, handles: list[BaseHandle]) -> None:
        self._window.release(requests=len(handles), buffered_bytes=sum(handle.held_bytes for handle in handles))


class RequestPublisher:
    """The producer of one client. Thread-safe but for ``work``, which one thread calls."""

    def __init__(
        self,
        producer: Producer,
        codec: Codec,
        tenant: str,
        handles: OpenHandles,
        window: Window,
        clock: ClockMs,
        *,
        offline: bool = False,
    ) -> None:
        self._producer = producer
        self._codec = codec
        self._tenant = tenant
        self._topic = backfill_topic(tenant) if offline else requests_topic(tenant)
        self._handles = handles
        self._window = window
        self._clock = clock
        self._lock = threading.Lock()
        # A request that is published again never follows its own cancellation.
        self._trying = threading.Lock()
        self._promise_lock = threading.Lock()
        self.submitted = 0
        self.published = 0
        self.publish_failed = 0

    def publish(self, encoded: EncodedRequest, policy: RetryPolicy, handle_type: type[HandleT]) -> HandleT:
        """Hand a request to the producer. The caller holds room for it in the window, which passes on to the handle.

        Raises:
            PublishFailed: the producer refused it at once.
            Backpressure: the producer's own queue is full.
            ClientClosed, Unavailable: the client ended.
        """
        request, size = encoded.request, len(encoded.value)
        handle = handle_type(
            request.request_id, self._topic, encoded.reply_to, self._clock(), self._promise_lock, self.cancel
        )
        handle.trace = encoded.trace
        if policy.tries > 1:
            # A request that may be sent again is kept until the reply is here, and so is its room.
            handle.attempts = Attempts(policy, request, encoded.headers, self._handles.now_ms)
            handle.held_bytes = size
        handle.queued_bytes = size - handle.held_bytes
        try:
            self._handles.enter(handle)
        except FairlaneError:
            self._window.release(requests=1, buffered_bytes=size)
            raise
        try:
            self._produce(handle, encoded.value, encoded.headers)
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

    def cancel(self, handle: BaseHandle) -> None:
        """See ``Handle.cancel``."""
        attempts = handle.attempts
        with self._trying:
            if not handle.cancellable:
                return
            self._handles.raise_if_ended()
            # A request that may be in the log is cancelled there, too; one that was refused is not.
            if attempts is None or not isinstance(attempts.ending, InferenceReply):
                self._produce_cancellation(handle)
            # Only now: a request that cannot be cancelled still waits for its try, and ends by that.
            ending = self._handles.give_up(handle)
        if ending is not None:
            self.end(handle, ending)

    def publish_feedback(self, feedback: Feedback) -> "Future[None]":
        """Hand feedback to the producer. The future ends when it is acknowledged, or raises PublishFailed.

        Raises:
            PublishFailed: the producer refused it at once.
            Backpressure: the producer's own queue is full.
            ClientClosed, Unavailable: the client ended.
        """
        self._handles.raise_if_ended()
        request_id, acknowledged = feedback.request_id, Future[None]()

        def report(error: KafkaError | None, _message: Message) -> None:
            # Runs inside the producer's poll or flush. A future that its caller gave up takes no result.
            if not acknowledged.set_running_or_notify_cancel():
                return
            if error is None:
                acknowledged.set_result(None)
                return
            uncertain = error.code() in UNCERTAIN_DELIVERY_ERRORS
            acknowledged.set_exception(
                PublishFailed(request_id, self._topic, error.str(), uncertain=uncertain, what=_FEEDBACK)
            )

        headers: KafkaHeaders = [*cloud_events.of_feedback(self._tenant, request_id, str(uuid4())), *current_trace()]
        try:
            value = self._codec.encode(feedback)
            self._producer.produce(self._topic, value, request_id.encode(), headers=headers, on_delivery=report)
        except BufferError:
            raise Backpressure("the producer's queue is full") from None
        except KafkaException as error:
            raise PublishFailed(request_id, self._topic, reason_of(error), what=_FEEDBACK) from error
        return acknowledged

    def not_confirmed(self, request_id: str) -> PublishFailed:
        """The error for feedback of which nothing was reported in time."""
        reason = f"no report within {CONFIRM_TIMEOUT_S:g} s"
        return PublishFailed(request_id, self._topic, reason, uncertain=True, what=_FEEDBACK)

    def work(self, timeout_s: float) -> None:
        """Serve delivery reports for up to ``timeout_s``, and publish again what is due."""
        self._producer.poll(timeout_s)
        for handle in self._handles.take_due():
            self._publish_again(handle)

    def flush(self, timeout_s: float) -> int:
        """Wait until the producer's queue is empty; its length after ``timeout_s``."""
        return self._producer.flush(timeout_s)

    def purge(self, timeout_s: float) -> None:
        """Drop the producer's queue."""
        self._producer.purge()
        self._producer.flush(timeout_s)

    def close_retries(self) -> None:
        """End requests that wait for a retry with the result of their last attempt."""
        for handle in self._handles.close_retries():
            if (ending := self._handles.give_up(handle)) is not None:
                self.end(handle, ending)

    def end(self, handle: BaseHandle, ending: InferenceReply | PublishFailed) -> None:
        """Give a handle its result instead of another try."""
        if not self._handles.finish(handle, ending, self._clock()):
            handle.keep_published(None, None)  # the reply was there first: it is in the log
        elif isinstance(ending, PublishFailed):
            with self._lock:
                self.publish_failed += 1

    def _publish_again(self, handle: BaseHandle) -> None:
        attempts = handle.attempts
        assert attempts is not None  # noqa: S101 - a mistake in this package, not of a caller
        request = attempts.request_at(self._handles.now_ms)
        value = None if request is None else self._codec.encode(request)
        reason, is_full = None, False
        with self._trying:
            if not self._handles.begin_try(handle):
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
        if not (is_full and self._handles.keeps_lost(handle, failure)):
            self.end(handle, failure)

    def _produce(self, handle: BaseHandle, value: bytes, headers: KafkaHeaders) -> None:
        report = partial(self._on_delivery, handle)
        self._producer.produce(self._topic, value, handle.request_id.encode(), headers=headers, on_delivery=report)

    def _release_queued(self, handle: BaseHandle) -> None:
        """Give back the room in the producer's queue, once."""
        with self._lock:
            queued_bytes, handle.queued_bytes = handle.queued_bytes, 0
        self._window.release(buffered_bytes=queued_bytes)

    def _on_delivery(self, handle: BaseHandle, error: KafkaError | None, message: Message) -> None:
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
        if not (uncertain and self._handles.keeps_lost(handle, failure)):
            self.end(handle, failure)

    def _produce_cancellation(self, handle: BaseHandle) -> None:
        """Hand the cancellation to the producer. After an error, trying again is allowed.

        It has the key of its request and the same producer, so it follows it in the same partition. It carries the
        trace of the caller; without one, as for a stream that was dropped, that of the request.
        """
        handle.cancel_sent_at_ms = self._clock()
        request_id = handle.request_id
        try:
            self._producer.produce(
                handle.topic,
                self._codec.encode(CancelRequest(request_id)),
                request_id.encode(),
                headers=[*cloud_events.of_cancellation(self._tenant, request_id), *(current_trace() or handle.trace)],
                on_delivery=partial(self._on_cancellation_delivery, handle),
            )
        except BufferError:
            handle.cancel_sent_at_ms = None
            raise Backpressure("the producer's queue is full") from None
        except KafkaException as error:
            handle.cancel_sent_at_ms = None
            raise PublishFailed(request_id, handle.topic, reason_of(error), what="cancellation of request") from error

    def _on_cancellation_delivery(self, handle: BaseHandle, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            handle.cancel_sent_at_ms = None
            log.warning(
                "cancel_not_published request_id=%s topic=%s reason=%s", handle.request_id, handle.topic, error.str()
            )
