"""The text of one answer as it is generated; returned by ``stream``."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from fairlane.client.core import ClientCore
from fairlane.client.handle import AsyncHandle, Handle, from_any_thread, no_text_yet
from fairlane.client.reassembly import TextDelta
from fairlane.client.streaming import StreamedAnswer
from fairlane.records import InferenceReply, InferenceRequest


class _Stream:
    """Shared part of both streams, without waiting."""

    def __init__(self, core: ClientCore, request: InferenceRequest, timeout_s: float | None) -> None:
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

    def _follow(self, answer: StreamedAnswer, handle: Handle) -> None:
        answer.follow(handle)
        self._answer = answer
        # Not by closing here and now: a finalizer may run where a lock is held that closing needs.
        self._when_dropped = weakref.finalize(self, self._core.chunks.dropped.put, answer)
        self._when_dropped.atexit = False

    def _leave(self) -> None:
        self._left.set()
        if self._answer is not None and self._when_dropped is not None and self._when_dropped.detach() is not None:
            self._core.chunks.leave(self._answer)


class TextStream(_Stream):
    """The text of one answer as it is made; iterate it in one thread at a time, ``close`` it from any.

    >>> with client.stream(model="smollm2-135m-instruct", prompt="The capital of France is") as stream:
    ...     shown = ""
    ...     for delta in stream:
    ...         shown = delta.text if delta.restarted else shown + delta.text
    ...     print(shown, stream.reply().usage.completion_tokens)
    Paris. 2

    The deltas end with the text of the final reply, which is the one that counts: what of it did not come as chunks
    comes with it, as one delta, and if it differs from what came, the text starts again. Whoever takes them late gets
    fewer and longer ones.

    Leaving early cancels the request: ``close``, the end of the ``with`` block, or dropping the stream, as a loop does
    that is left with ``break``.
    """

    def __init__(
        self,
        core: ClientCore,
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
                raise no_text_yet(self.request_id, self._timeout_s)
        raise StopIteration

    def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome, whether the text was taken or not; see :meth:`Handle.reply`."""
        return self._handle.reply(timeout)

    def close(self) -> None:
        """End the iteration, and cancel the request if it has no reply yet. May be called again; never raises."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        core: ClientCore,
        request: InferenceRequest,
        timeout_s: float | None,
        submit: Callable[[InferenceRequest], Awaitable[Handle]],
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                handle = await self._submit(self._request)
            except BaseException:
                answer.stop()
                raise
            self._handle = AsyncHandle(handle)
            self._follow(answer, handle)
            if self._left.is_set():  # meanwhile, by another task
                self._leave()
            return answer

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            raise no_text_yet(self.request_id, self._timeout_s) from None
