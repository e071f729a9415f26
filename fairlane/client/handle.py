"""Handles of submitted requests, for threads and for asyncio, and the future that settles them."""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fairlane.errors import FairlaneError, Timeout, unsuccessful_error
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.trace_context import TraceHeaders

if TYPE_CHECKING:
    from fairlane.client.publisher import Attempts

ValueT = TypeVar("ValueT")


class ReplyFuture(Generic[ValueT]):
    """A value or an error that is set once. Thread-safe.

    Unlike ``concurrent.futures.Future`` it makes its event only for a wait, and shares a lock with others.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_value")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._done = False
        self._value: ValueT | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    @property
    def done(self) -> bool:
        return self._done

    def keep(self, value: ValueT) -> bool:
        """Set the value; False when it was settled before."""
        return self._settle(value, None)

    def break_with(self, error: Exception) -> bool:
        """Set the error that ``get`` raises; False when it was settled before."""
        return self._settle(None, error)

    def get(self) -> ValueT:
        """The value; raises the error instead if there is one. Only after ``done``."""
        if self._error is not None:
            raise self._error
        assert self._done  # noqa: S101 - a mistake in this package, not of a caller
        return self._value  # type: ignore[return-value]  # None only where ValueT allows it

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once it is settled, on the settling thread, or at once. It must be short and never raise."""
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo ``when_done``; nothing happens if it was called already."""
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is settled; False when that took longer than ``timeout_s``."""
        if self._done:
            return True
        event = threading.Event()
        wake = event.set
        self.when_done(wake)
        try:
            return event.wait(timeout_s)
        finally:
            self.forget(wake)

    def _settle(self, value: ValueT | None, error: Exception | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value = value
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()
        return True


class BaseHandle:
    """State and settlement of one submitted request; base of both handles.

    What is not documented in :class:`Handle` is for the client alone.
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
        cancel: "Callable[[BaseHandle], None]",
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
        self.acknowledged: ReplyFuture[SourceCoordinate | None] = ReplyFuture(lock)
        self.replied: ReplyFuture[InferenceReply] = ReplyFuture(lock)

    def done(self) -> bool:
        """Whether ``reply`` would return or raise at once."""
        return self.replied.done

    def cancel(self) -> None:
        """Say that the answer is not wanted any more; returns at once, and may be called again.

        It is a wish: the request still gets exactly one final reply. That is ``cancelled``, and then ``result`` raises
        Cancelled, or the reply it would have got otherwise, if it was too late. Nothing is sent when the reply is here.

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
        """Nothing more can come to this handle."""
        return self.received_at_ms is not None or (self.acknowledged.done and self.replied.done)

    def keep_published(self, where: SourceCoordinate | None, now_ms: int | None) -> None:
        """The request is in the log. The first time counts, if it is published again."""
        if not self.acknowledged.done:
            self.published_at_ms = now_ms
        self.acknowledged.keep(where)

    def keep_reply(self, reply: InferenceReply, received_at_ms: int) -> None:
        self.received_at_ms = received_at_ms
        self.replied.keep(reply)

    def fail(self, error: FairlaneError) -> None:
        """Neither acknowledgement nor reply will come, where they have not yet."""
        self.acknowledged.break_with(error)
        self.replied.break_with(error)

    def __repr__(self) -> str:
        state = "done" if self.done() else "published" if self.acknowledged.done else "submitted"
        return f"<{type(self).__name__} {self.request_id} {state}>"

    def _replied(self, in_time: bool, timeout_s: float | None) -> InferenceReply:
        if not in_time:
            raise Timeout(f"request {self.request_id}: no reply within {timeout_s:g} s")
        return self.replied.get()

    def _acknowledged(self, in_time: bool, timeout_s: float | None) -> SourceCoordinate | None:
        if not in_time:
            raise Timeout(f"request {self.request_id}: not acknowledged by {self.topic} within {timeout_s:g} s")
        return self.acknowledged.get()


HandleT = TypeVar("HandleT", bound=BaseHandle)


class Handle(BaseHandle):
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

    __slots__ = ()

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
        return self._replied(self.replied.wait(timeout), timeout)

    def published(self, timeout: float | None = None) -> SourceCoordinate | None:
        """Wait until the request is in the log: from then on it gets exactly one final reply.

        Returns its position there; None when the acknowledgement was lost and only the reply proves it.

        Raises:
            Timeout: not acknowledged within ``timeout`` seconds.
            PublishFailed: it was refused, or no answer came.
            Unavailable, ClientClosed: the client ended first; it may be in the log all the same.
        """
        return self._acknowledged(self.acknowledged.wait(timeout), timeout)


class AsyncHandle(BaseHandle):
    """One submitted request; awaiting it is awaiting its result. See :class:`Handle` for the attributes.

    .. code-block:: python

        handle = await client.submit(model="smollm2-135m-instruct", prompt="The capital of France is")
        print((await handle).output.text)  # Paris.
    """

    __slots__ = ()

    async def result(self, timeout: float | None = None) -> InferenceReply:
        """The reply, if its outcome is ``ok``; see :meth:`Handle.result`."""
        return successful(await self.reply(timeout))

    async def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome; see :meth:`Handle.reply`."""
        return self._replied(await _settled(self.replied, timeout), timeout)

    async def published(self, timeout: float | None = None) -> SourceCoordinate | None:
        """Wait until the request is in the log; see :meth:`Handle.published`."""
        return self._acknowledged(await _settled(self.acknowledged, timeout), timeout)

    def __await__(self) -> Generator[Any, None, InferenceReply]:
        return self.result().__await__()


def successful(reply: InferenceReply) -> InferenceReply:
    """The reply, or raise the error of its outcome."""
    if (error := unsuccessful_error(reply)) is not None:
        raise error
    return reply


async def _settled(future: ReplyFuture[Any], timeout_s: float | None) -> bool:
    """Whether the future is settled, waiting for it up to ``timeout_s``."""
    if future.done:
        return True
    woken, wake = waker()
    future.when_done(wake)
    try:
        await asyncio.wait_for(woken, timeout_s)
    except TimeoutError:
        return future.done
    finally:
        future.forget(wake)
    return True


def waker() -> "tuple[asyncio.Future[None], Callable[[], None]]":
    """A future of this loop, and what sets it from any thread."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_it() -> None:
        if not woken.done():
            woken.set_result(None)

    return woken, from_any_thread(set_it)


def from_any_thread(call: Callable[[], None]) -> Callable[[], None]:
    """A function that makes this loop call ``call``, from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        # A closed loop has no waiting tasks.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call)

    return wake
