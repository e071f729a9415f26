"""The client for asyncio: the same core, its blocking parts kept off the event loop."""

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from fairlane.client.base import BaseClient, ReplyOptions, SubmitItem
from fairlane.client.handle import Handle, no_reply_yet, not_published_yet, successful
from fairlane.client.promise import Promise
from fairlane.client.requests import RequestFields, build_request
from fairlane.records import InferenceReply, InferenceRequest, SourceCoordinate

if TYPE_CHECKING:
    from fairlane.client.group_member import GroupMember


class AsyncHandle:
    """One submitted request; awaiting it is awaiting its result. See :class:`Handle` for the attributes.

    >>> handle = await client.submit(model="smollm2-135m-instruct", prompt="The capital of France is")
    >>> (await handle).output.text
    ' Paris.'
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

    def done(self) -> bool:
        """Whether ``reply`` would return or raise at once."""
        return self._handle.done()

    async def result(self, timeout: float | None = None) -> InferenceReply:
        """The reply, if its outcome is ``ok``; see :meth:`Handle.result`."""
        return successful(await self.reply(timeout))

    async def reply(self, timeout: float | None = None) -> InferenceReply:
        """The final reply whatever its outcome; see :meth:`Handle.reply`."""
        handle = self._handle
        if not await _settled(handle.replied, timeout):
            raise no_reply_yet(handle, timeout)
        return handle.replied.get()

    async def published(self, timeout: float | None = None) -> SourceCoordinate | None:
        """Wait until the request is in the log; see :meth:`Handle.published`."""
        handle = self._handle
        if not await _settled(handle.acknowledged, timeout):
            raise not_published_yet(handle, timeout)
        return handle.acknowledged.get()

    def __await__(self) -> Generator[Any, None, InferenceReply]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Async{repr(self._handle)[1:]}"


class AsyncClient(BaseClient):
    """:class:`Client` with its verbs as coroutines; any number of tasks may use it.

    >>> async with AsyncClient(tenant="acme") as client:
    ...     handles = [await client.submit(model="all-minilm-l6-v2", task="embed", texts=[text]) for text in texts]
    ...     replies = await asyncio.gather(*handles)

    Arguments: see :class:`fairlane.client.base.BaseClient`.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect now instead of at the first submit; see :meth:`Client.start`."""
        if not self._core.started:
            await asyncio.to_thread(self._core.start)

    async def submit(self, **fields: Unpack[RequestFields]) -> AsyncHandle:
        """Publish one request; returns before it is acknowledged. See :meth:`Client.submit`."""
        return await self.submit_request(build_request(**fields))

    async def submit_request(self, request: InferenceRequest) -> AsyncHandle:
        """Publish a request that was built elsewhere; otherwise like ``submit``."""
        core = self._core
        await self.start()
        prepared = core.prepare(request)
        size = len(prepared.value)
        if not core.window.try_acquire(size) and not await self._wait_for_room(size):
            raise core.no_room()
        return AsyncHandle(core.publish(prepared))

    async def submit_many(self, items: Iterable[SubmitItem] | AsyncIterable[SubmitItem]) -> AsyncIterator[AsyncHandle]:
        """Publish requests as fast as the bounds allow, lazily; see :meth:`Client.submit_many`.

        >>> async for handle in client.submit_many(requests):
        ...     handles.append(handle)
        """
        index = 0
        async for item in _each(items):
            try:
                handle = await self.submit_request(self._request_of(item))
            except Exception as error:
                error.add_note(f"item {index} of submit_many")
                raise
            index += 1
            yield handle

    def replies(self, group_id: str, **options: Unpack[ReplyOptions]) -> "AsyncReplyStream":
        """Read a reply topic as a member of a group; see :meth:`Client.replies`.

        >>> async with client.replies("billing", service="billing") as replies:
        ...     async for reply in replies:
        ...         await book(reply.request_id, reply.usage)
        """
        return AsyncReplyStream(self._member(group_id, **options))

    async def flush(self, timeout: float | None = None) -> int:
        """Wait until every request is acknowledged or refused; see :meth:`Client.flush`."""
        return await asyncio.to_thread(self._core.flush, -1 if timeout is None else timeout)

    async def close(self) -> None:
        """Flush, within the close timeout, then stop. Handles still open get ClientClosed. May be called again."""
        for member in list(self._members):
            await asyncio.to_thread(member.close)
        await asyncio.to_thread(self._core.close)

    async def _wait_for_room(self, size_bytes: int) -> bool:
        window = self._core.window
        woken, wake = _waker()
        ticket = window.enter_line(size_bytes, wake)
        try:
            await asyncio.wait_for(woken, self._core.limits.submit_timeout_ms / 1_000)
        except TimeoutError:
            pass
        except BaseException:  # cancelled: the place in the line must not be lost with the task
            window.leave_line(ticket)
            raise
        return window.claim(ticket)


class AsyncReplyStream:
    """The replies of a topic, one by one; see :class:`ReplyStream`. For one task at a time.

    A ``anext`` that is cancelled loses nothing: what it would have returned, the next one returns.
    """

    def __init__(self, member: "GroupMember") -> None:
        self._member = member
        # A thread of its own: the default pool is small, and each stream would hold one of its threads for ever.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fairlane-reply-stream")
        self._fetch: Future[InferenceReply | None] | None = None
        self._finalizer = weakref.finalize(self, _abandon, member, self._thread)

    @property
    def topic(self) -> str:
        """The topic it reads."""
        return self._member.topic

    @property
    def undecodable(self) -> int:
        """How many records were no reply."""
        return self._member.undecodable

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceReply:
        """The next reply; the one before it counts as done from now on. See :meth:`ReplyStream.__next__`."""
        if not self._finalizer.alive:
            raise StopAsyncIteration
        if self._fetch is None:
            self._fetch = self._thread.submit(self._member.next)
        # Shielded, because the thread goes on when this task is cancelled, and its reply belongs to the next call.
        fetch = self._fetch
        try:
            reply = await asyncio.shield(asyncio.wrap_future(fetch))
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._fetch = None
            raise
        self._fetch = None
        if reply is None:
            raise StopAsyncIteration
        return reply

    async def ack(self) -> None:
        """The latest reply is done: commit that now. See :meth:`ReplyStream.ack`."""
        await asyncio.wrap_future(self._thread.submit(self._member.ack))

    async def close(self) -> None:
        """Commit what is done and leave the group. The latest reply is not done unless ``ack`` said so."""
        if self._finalizer.detach() is not None:
            self._member.stop()
            await asyncio.wrap_future(self._thread.submit(self._member.close))
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _abandon(member: "GroupMember", thread: ThreadPoolExecutor) -> None:
    member.stop()
    thread.submit(member.close)
    thread.shutdown(wait=False)


async def _settled(promise: Promise[Any], timeout_s: float | None) -> bool:
    """Whether the promise is settled, waiting for it up to ``timeout_s``."""
    if promise.done:
        return True
    woken, wake = _waker()
    promise.when_done(wake)
    try:
        await asyncio.wait_for(woken, timeout_s)
    except TimeoutError:
        return promise.done
    finally:
        promise.forget(wake)
    return True


def _waker() -> "tuple[asyncio.Future[None], Callable[[], None]]":
    """A future of this loop, and what sets it from any thread."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def set_it() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake() -> None:
        # A loop that is closed has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(set_it)

    return woken, wake


async def _each(items: Iterable[SubmitItem] | AsyncIterable[SubmitItem]) -> AsyncIterator[SubmitItem]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
