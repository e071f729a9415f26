"""The handle for asyncio, and how a task waits for what another thread does."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from fairlane.client.future import Future
from fairlane.client.handle import Handle, no_reply_yet, not_published_yet, successful
from fairlane.records import InferenceReply, SourceCoordinate


class AsyncHandle:
    """One submitted request; awaiting it is awaiting its result. See :class:`Handle` for the attributes.

    .. code-block:: python

        handle = await client.submit(model="smollm2-135m-instruct", prompt="The capital of France is")
        print((await handle).output.text)  # Paris.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._handle.request_id

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self._handle.topic

    @property
    def reply_to(self) -> str:
        """The topic its reply goes to."""
        return self._handle.reply_to

    @property
    def submitted_at_ms(self) -> int:
        """When it was handed to the producer."""
        return self._handle.submitted_at_ms

    @property
    def published_at_ms(self) -> int | None:
        """When the acknowledgement came; None until then."""
        return self._handle.published_at_ms

    @property
    def received_at_ms(self) -> int | None:
        """When the reply was read; None until then."""
        return self._handle.received_at_ms

    @property
    def cancel_sent_at_ms(self) -> int | None:
        """When a cancellation was handed to the producer; None without one."""
        return self._handle.cancel_sent_at_ms

    def done(self) -> bool:
        """Whether ``reply`` would return or raise at once."""
        return self._handle.done()

    async def result(self, timeout: float | None = None) -> InferenceReply:
        """The reply, if its outcome is ``ok``; see :meth:`Handle.result`."""
        return successful(await self.reply(timeout))

    async def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome; see :meth:`Handle.reply`."""
        handle = self._handle
        if not await settled(handle.replied, timeout):
            raise no_reply_yet(handle, timeout)
        return handle.replied.get()

    def cancel(self) -> None:
        """Say that the answer is not wanted any more; see :meth:`Handle.cancel`. There is nothing to await."""
        self._handle.cancel()

    async def published(self, timeout: float | None = None) -> SourceCoordinate | None:
        """Wait until the request is in the log; see :meth:`Handle.published`."""
        handle = self._handle
        if not await settled(handle.acknowledged, timeout):
            raise not_published_yet(handle, timeout)
        return handle.acknowledged.get()

    def when_done(self, callback: Callable[[], None]) -> None:
        """For the client alone: call this, from any thread, once ``reply`` would return or raise at once."""
        self._handle.replied.when_done(callback)

    def __await__(self) -> Generator[Any, None, InferenceReply]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Async{repr(self._handle)[1:]}"


async def settled(promise: Future[Any], timeout_s: float | None) -> bool:
    """Whether the promise is settled, waiting for it up to ``timeout_s``."""
    if promise.done:
        return True
    woken, wake = waker()
    promise.when_done(wake)
    try:
        await asyncio.wait_for(woken, timeout_s)
    except TimeoutError:
        return promise.done
    finally:
        promise.forget(wake)
    return True


def waker() -> "tuple[asyncio.Future[None], Callable[[], None]]":
    """A future of this loop, and what sets it from any thread."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_it() -> None:
        if not woken.done():
            woken.set_result(None)

    return woken, from_any_thread(set_it)


def from_any_thread(call: Callable[[], None]) -> Callable[[], None]:
    """What makes this loop call something."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        # A loop that is closed has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call)

    return wake
