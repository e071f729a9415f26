"""The text of an answer as it is generated: streams of both clients, and the reader of chunks that fills them."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaException

from fairlane.client.connector import log
from fairlane.client.handle import AsyncHandle, BaseHandle, Handle, from_any_thread, successful
from fairlane.client.reader import TopicReader
from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.clock import ClockMs
from fairlane.closing import Closing
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import FairlaneError, Timeout
from fairlane.records import InferenceReply, InferenceRequest, ReplyChunk

if TYPE_CHECKING:
    from fairlane.client.core import ClientCore

_START_TIMEOUT_S = 3.0
_START_AGAIN_S = 30.0
_THREAD_TIMEOUT_S = 5.0


class StreamedAnswer:
    """One answer between the client's threads, which fill it, and the stream that empties it.

    Args:
        request_id: of the request, which is not published before this listens.
        wake: called, on any thread, when there may be something to take. It must be short and never raise.
        forget: called, on any thread, when no more chunks are wanted.
    """

    def __init__(self, request_id: str, wake: Callable[[], None], forget: "Callable[[StreamedAnswer], None]") -> None:
        self.request_id = request_id
        self.handle: BaseHandle | None = None
        """The request's; None while it is not published."""
        self.over = False
        self._wake = wake
        self._forget = forget
        self._lock = threading.Lock()
        self._text = Reassembly()
        self._reply: InferenceReply | None = None

    @property
    def text(self) -> str:
        """The text taken so far."""
        with self._lock:
            return self._text.text

    def follow(self, handle: BaseHandle) -> None:
        """The request was handed to the producer."""
        self.handle = handle
        handle.replied.when_done(self.stop)

    def add(self, chunk: ReplyChunk) -> None:
        """A chunk of this request came."""
        with self._lock:
            new = self._text.add(chunk)
        if new:
            self._wake()

    def take(self) -> TextDelta | None:
        """Text that arrived since the last call; None if none did or, if ``over``, at the end.

        Raises:
            The same as ``Handle.result``, once all text was taken.
        """
        handle = self.handle
        with self._lock:
            if self._reply is None and handle is not None and handle.done():
                self._reply = handle.replied.get()
                self._text.finish(self._reply)
            delta = self._text.take()
            reply = self._reply
        if delta is None and reply is not None:
            successful(reply)
            self.over = True
        return delta

    def stop(self) -> None:
        """Stop collecting chunks: the reply has arrived, or the stream was closed."""
        self._forget(self)
        self._wake()


class ChunkHub:
    """Reads a tenant's chunk topic on one thread, from the first stream on, for all streams of a client. Thread-safe.

    Chunks only make an answer come sooner. So whatever goes wrong here is logged, and the answers come in one piece,
    with their replies; a later stream tries again.

    Args:
        topic: of the chunks.
        consumer: makes the consumer that reads it.
        clock: the time.
    """

    def __init__(self, topic: str, consumer: Callable[[], Consumer], clock: ClockMs) -> None:
        # Answers whose stream was dropped rather than closed. Finalizers fill it, which must take no lock.
        self.dropped: SimpleQueue[StreamedAnswer] = SimpleQueue()
        self._topic = topic
        self._make_consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        # Tuples, so that the reading thread needs no lock to go through one.
        self._answers: dict[str, tuple[StreamedAnswer, ...]] = {}
        self._thread: threading.Thread | None = None
        self.running = False
        """Whether chunks are being read."""
        self._not_before = 0.0

    def start(self, codec: Codec) -> None:
        """Read from here on: a chunk that is written after this returns is seen. May be called again; never raises."""
        with self._starting:
            if self.running or self._stopping.is_set() or monotonic() < self._not_before:
                return
            try:
                reader = self._reader(codec)
            except (FairlaneError, KafkaException) as error:
                self._give_up(error)
                return
            self.running = True
            self._thread = threading.Thread(target=self._run, args=(reader,), name="fairlane-chunks", daemon=True)
            self._thread.start()

    def open(self, request_id: str, wake: Callable[[], None]) -> StreamedAnswer:
        """Begin to collect the chunks of a request that is about to be published."""
        answer = StreamedAnswer(request_id, wake, self._forget)
        with self._lock:
            self._answers[request_id] = (*self._answers.get(request_id, ()), answer)
        return answer

    def leave(self, answer: StreamedAnswer) -> None:
        """Close an answer and cancel its request if it has no reply yet. Never raises."""
        answer.stop()
        handle = answer.handle
        if handle is None or handle.done():
            return
        try:
            handle.cancel()
        except FairlaneError as error:
            log.warning("cancel_not_published request_id=%s reason=%s", handle.request_id, error)

    def leave_dropped(self) -> None:
        """Leave the answers in ``dropped``."""
        with suppress(Empty):
            while True:
                self.leave(self.dropped.get_nowait())

    def leave_all(self) -> None:
        """Leave every answer that is not complete."""
        self.leave_dropped()
        with self._lock:
            answers = [answer for same_id in self._answers.values() for answer in same_id]
        for answer in answers:
            self.leave(answer)

    def stop(self) -> None:
        """Read no more. Takes a few seconds at most."""
        self._stopping.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_THREAD_TIMEOUT_S)

    def _reader(self, codec: Codec) -> TopicReader[ReplyChunk]:
        consumer = self._make_consumer()
        is_wanted = self._answers.__contains__
        reader = TopicReader(consumer, self._topic, ReplyChunk, codec, is_wanted, self._deliver, self._clock)
        try:
            reader.seek_to_end(_START_TIMEOUT_S)
        except BaseException:
            reader.close()
            raise
        return reader

    def _run(self, reader: TopicReader[ReplyChunk]) -> None:
        try:
            reader.run(self._stopping)
        except Exception as error:  # noqa: BLE001 - the answers come without chunks
            self._give_up(error)
        finally:
            self.running = False
            reader.close()

    def _give_up(self, error: Exception) -> None:
        self._not_before = monotonic() + _START_AGAIN_S
        log.warning("chunks_not_read topic=%s reason=%s: answers come in one piece", self._topic, reason_of(error))

    def _deliver(self, chunk: ReplyChunk, _received_at_ms: int) -> None:
        for answer in self._answers.get(chunk.request_id, ()):
            answer.add(chunk)

    def _forget(self, answer: StreamedAnswer) -> None:
        with self._lock:
            others = tuple(other for other in self._answers.get(answer.request_id, ()) if other is not answer)
            if others:
                self._answers[answer.request_id] = others
            else:
                self._answers.pop(answer.request_id, None)


class _Stream:
    """Shared part of both streams, without waiting."""

    def __init__(self, core: "ClientCore", request: InferenceRequest, timeout_s: float | None) -> None:
        self._core = core
        self._request = request
        self._timeout_s = timeout_s
        self._answer: StreamedAnswer | None = None
        self._left = threading.Event()
        self._when_dropped: weakref.finalize[..., _Stream] | None = None

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._request.request_id

    @property
    def text(self) -> str:
        """The text of all deltas since the last restart; at the end, the text of the reply."""
        return "" if self._answer is None else self._answer.text

    def _follow(self, answer: StreamedAnswer, handle: BaseHandle) -> None:
        answer.follow(handle)
        self._answer = answer
        # Not by closing here and now: a finalizer may run where a lock is held that closing needs.
        self._when_dropped = weakref.finalize(self, self._core.chunks.dropped.put, answer)
        self._when_dropped.atexit = False

    def _no_text_yet(self) -> Timeout:
        return Timeout(f"request {self.request_id}: no text within {self._timeout_s:g} s")

    def _leave(self) -> None:
        self._left.set()
        if self._answer is not None and self._when_dropped is not None and self._when_dropped.detach() is not None:
            self._core.chunks.leave(self._answer)


class TextStream(_Stream, Closing):
    """The text of one answer as it is made; iterate it in one thread at a time, ``close`` it from any.

    >>> with client.stream(model="smollm2-135m-instruct", prompt="The capital of France is") as stream:
    ...     shown = ""
    ...     for delta in stream:
    ...         shown = delta.text if delta.restarted else shown + delta.text
    ...     print(shown, stream.reply().usage.completion_tokens)
    Paris. 2

    The deltas end with the text of the final reply, which is the one that counts: the part of it that did not come
    as chunks is one delta, and if it differs from what came, the text starts again. A late reader gets fewer and longer
    deltas.

    Leaving early cancels the request: ``close``, the end of the ``with`` block, or dropping the stream, as a loop does
    that is left with ``break``.
    """

    def __init__(
        self,
        core: "ClientCore",
        request: InferenceRequest,
        timeout_s: float | None,
        submit: Callable[[InferenceRequest], Handle],
    ) -> None:
        super().__init__(core, request, timeout_s)
        self._arrived = threading.Event()
        core.start_chunks()
        answer = core.chunks.open(request.request_id, self._arrived.set)
        try:
            self._handle = submit(request)
        except BaseException:
            answer.stop()
            raise
        self._follow(answer, self._handle)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        """The next piece of text, as soon as there is one.

        Raises:
            StopIteration: the answer is complete, or the stream was closed.
            Rejected, Expired, Cancelled, Failed: the final reply says so.
            Timeout: nothing came within the stream's timeout; the request goes on, and so may the iteration.
            PublishFailed, Unavailable, ClientClosed: no reply will come.
        """
        answer = self._answer
        while answer is not None:
            self._arrived.clear()
            if self._left.is_set():
                break
            delta = answer.take()
            if delta is not None:
                return delta
            if answer.over:
                break
            if not self._arrived.wait(self._timeout_s):
                raise self._no_text_yet()
        raise StopIteration

    def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome, whether the text was taken or not; see :meth:`Handle.reply`."""
        return self._handle.reply(timeout)

    def close(self) -> None:
        """End the iteration, and cancel the request if it has no reply yet. May be called again; never raises."""
        self._leave()


class AsyncTextStream(_Stream):
    """The text of one answer as it is made, for one task at a time; see :class:`TextStream`.

    .. code-block:: python

        async with client.stream(model="smollm2-135m-instruct", prompt="The capital of France is") as stream:
            async for delta in stream:
                await send(delta.text, restarted=delta.restarted)
            print((await stream.reply()).usage.completion_tokens)

    The request is published when the stream is entered, iterated or asked for its reply. A task that is cancelled while
    it waits for text has left the stream, and that cancels the request; to wait only so long, there is the timeout of
    ``stream``.
    """

    def __init__(
        self,
        core: "ClientCore",
        request: InferenceRequest,
        timeout_s: float | None,
        submit: Callable[[InferenceRequest], Awaitable[AsyncHandle]],
    ) -> None:
        super().__init__(core, request, timeout_s)
        self._submit = submit
        self._arrived = asyncio.Event()
        self._opening = asyncio.Lock()
        self._handle: AsyncHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        """The next piece of text; see :meth:`TextStream.__next__`. The first one may raise what ``submit`` raises."""
        try:
            while not self._left.is_set():
                answer = self._answer or await self._open()
                self._arrived.clear()
                if self._left.is_set():
                    break
                delta = answer.take()
                if delta is not None:
                    return delta
                if answer.over:
                    break
                await self._wait()
        except asyncio.CancelledError:
            self._leave()
            raise
        raise StopAsyncIteration

    async def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome, whether the text was taken or not; see :meth:`Handle.reply`.

        Raises:
            ValueError: the stream was closed before anything was sent.
        """
        await self._open()
        assert self._handle is not None  # noqa: S101 - a mistake in this package, not of a caller
        return await self._handle.reply(timeout)

    async def close(self) -> None:
        """End the iteration, and cancel the request if it has no reply yet. May be called again; never raises."""
        self._leave()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _open(self) -> StreamedAnswer:
        async with self._opening:
            if self._answer is not None:
                return self._answer
            if self._left.is_set():
                raise ValueError("the stream was closed before anything was sent")
            if not self._core.chunks.running:
                await asyncio.to_thread(self._core.start_chunks)
            answer = self._core.chunks.open(self.request_id, from_any_thread(self._arrived.set))
            try:
                self._handle = await self._submit(self._request)
            except BaseException:
                answer.stop()
                raise
            self._follow(answer, self._handle)
            if self._left.is_set():  # meanwhile, by another task
                self._leave()
            return answer

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            raise self._no_text_yet() from None
