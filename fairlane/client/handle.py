"""What ``submit`` returns: the way to the reply of one request."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fairlane.client.future import Future
from fairlane.errors import FairlaneError, Timeout, unsuccessful_error
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.trace_context import TraceHeaders

if TYPE_CHECKING:
    from fairlane.client.attempts import Attempts


class Handle:
    """One submitted request. Safe to use from any thread, and after the client was closed.

    >>> handle = client.submit(model="smollm2-135m-instruct", prompt="The capital of France is")
    >>> handle.result(timeout=30).output.text
    ' Paris.'

    Attributes:
        request_id: of the request.
        topic: the topic it was published to.
        reply_to: the topic its reply goes to.
        submitted_at_ms: when it was handed to the producer, by this machine's clock, milliseconds since the epoch.
        published_at_ms: when the broker's acknowledgement came; None until then.
        received_at_ms: when the reply was read from its topic; None until then.
        cancel_sent_at_ms: when a cancellation was handed to the producer; None without one, and again if it failed.
    """

    __slots__ = (
        "_cancel",
        "acknowledged",
        "attempts",
        "cancel_sent_at_ms",
        "held_bytes",
        "published_at_ms",
        "queued_bytes",
        "received_at_ms",
        "replied",
        "reply_to",
        "request_id",
        "submitted_at_ms",
        "topic",
        "trace",
    )

    def __init__(
        self,
        request_id: str,
        topic: str,
        reply_to: str,
        submitted_at_ms: int,
        lock: threading.Lock,
        cancel: "Callable[[Handle], None]",
    ) -> None:
        self.request_id = request_id
        self.topic = topic
        self.reply_to = reply_to
        self.submitted_at_ms = submitted_at_ms
        self.published_at_ms: int | None = None
        self.received_at_ms: int | None = None
        self.cancel_sent_at_ms: int | None = None
        self._cancel = cancel
        self.attempts: Attempts | None = None
        self.trace: TraceHeaders = ()
        self.held_bytes = 0
        self.queued_bytes = 0
        self.acknowledged: Future[SourceCoordinate | None] = Future(lock)
        self.replied: Future[InferenceReply] = Future(lock)

    def done(self) -> bool:
        """Whether ``reply`` would return or raise at once."""
        return self.replied.done

    def result(self, timeout: float | None = None) -> InferenceReply:
        """The reply, if its outcome is ``ok``; waits up to ``timeout`` seconds, None for as long as it takes.

        Raises:
            Rejected, Expired, Cancelled, Failed: the final reply says so.
            Timeout: no reply yet.
            PublishFailed, AnsweredElsewhere, Unavailable, ClientClosed: none will come to this handle.
        """
        return successful(self.reply(timeout))

    def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome; waits up to ``timeout`` seconds, None for as long as it takes.

        Raises:
            Timeout: no reply yet.
            PublishFailed, AnsweredElsewhere, Unavailable, ClientClosed: none will come to this handle.
        """
        if not self.replied.wait(timeout):
            raise no_reply_yet(self, timeout)
        return self.replied.get()

    def published(self, timeout: float | None = None) -> SourceCoordinate | None:
        """Wait until the request is in the log: from then on it gets exactly one final reply.

        Returns where it stands there; None when the acknowledgement was lost and only the reply proves it.

        Raises:
            Timeout: not acknowledged within ``timeout`` seconds.
            PublishFailed: it was refused, or no answer came.
            Unavailable, ClientClosed: the client ended first; it may be in the log all the same.
        """
        if not self.acknowledged.wait(timeout):
            raise not_published_yet(self, timeout)
        return self.acknowledged.get()

    def cancel(self) -> None:
        """Say that the answer is not wanted any more; returns at once, and may be called again.

        It is a wish: the request still gets exactly one final reply. That is ``cancelled``, and then ``result`` raises
        Cancelled, or what it would have been without, if it was too late. Nothing is sent when the reply is here.

        >>> handle.cancel()
        >>> handle.reply(timeout=10).outcome
        'cancelled'

        Raises:
            PublishFailed, Backpressure: the producer did not take the cancellation. What the broker refuses later is
                logged, and ``cancel_sent_at_ms`` is None again.
            Unavailable, ClientClosed: the client ended.
        """
        self._cancel(self)

    @property
    def cancellable(self) -> bool:
        """Whether ``cancel`` would send something: there is no reply, and no cancellation under way."""
        return self.received_at_ms is None and self.cancel_sent_at_ms is None

    @property
    def over(self) -> bool:
        """For the client alone: nothing more can come to this handle."""
        return self.received_at_ms is not None or (self.acknowledged.done and self.replied.done)

    def keep_published(self, where: SourceCoordinate | None, now_ms: int | None) -> None:
        """For the client alone: the request is in the log. The first time counts, if it is published again."""
        if not self.acknowledged.done:
            self.published_at_ms = now_ms
        self.acknowledged.keep(where)

    def keep_reply(self, reply: InferenceReply, received_at_ms: int) -> None:
        """For the client alone: the final reply is here."""
        self.received_at_ms = received_at_ms
        self.replied.keep(reply)

    def break_reply(self, error: FairlaneError) -> None:
        """For the client alone: no reply will come to this handle."""
        self.replied.break_with(error)

    def fail(self, error: FairlaneError) -> None:
        """For the client alone: neither acknowledgement nor reply will come, where they have not yet."""
        self.acknowledged.break_with(error)
        self.replied.break_with(error)

    def __repr__(self) -> str:
        state = "done" if self.done() else "published" if self.acknowledged.done else "submitted"
        return f"<Handle {self.request_id} {state}>"


def successful(reply: InferenceReply) -> InferenceReply:
    """The reply, or the error it stands for."""
    if (error := unsuccessful_error(reply)) is not None:
        raise error
    return reply


def no_reply_yet(handle: Handle, timeout_s: float | None) -> Timeout:
    """The error for a wait for the reply that was too short."""
    return Timeout(f"request {handle.request_id}: no reply within {timeout_s:g} s")


def no_text_yet(request_id: str, timeout_s: float | None) -> Timeout:
    """The error for a wait for the next text that was too short."""
    return Timeout(f"request {request_id}: no text within {timeout_s:g} s")


def not_published_yet(handle: Handle, timeout_s: float | None) -> Timeout:
    """The error for a wait for the acknowledgement that was too short."""
    return Timeout(f"request {handle.request_id}: not acknowledged by {handle.topic} within {timeout_s:g} s")
