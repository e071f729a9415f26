"""The client for asyncio: the same core, its blocking parts kept off the event loop."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from fairlane.client.base import BaseClient, BaseReplyStream, ReplyOptions, ServiceOptions, SubmitItem, noted
from fairlane.client.conversation import AsyncConversation
from fairlane.client.group_member import GroupMember, UndecodableReply
from fairlane.client.handle import AsyncHandle, from_any_thread, waker
from fairlane.client.publisher import CONFIRM_TIMEOUT_S
from fairlane.client.reply_service import AsyncOnDeadLetter, AsyncReplyHandler, AsyncReplyService
from fairlane.client.requests import RequestFields, build_request, streamed
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.text_stream import AsyncTextStream
from fairlane.errors import FairlaneError
from fairlane.feedback import FeedbackFields, build_feedback
from fairlane.records import InferenceReply, InferenceRequest
from fairlane.settings import KafkaSettings

T = TypeVar("T")


class AsyncClient(BaseClient):
    """:class:`Client` with its verbs as coroutines; any number of tasks may use it.

    .. code-block:: python

        async with AsyncClient(tenant="acme") as client:
            handles = [await client.submit(model="all-minilm-l6-v2", task="embed", texts=[text]) for text in texts]
            replies = await asyncio.gather(*handles)

    Arguments: see :class:`fairlane.client.base.BaseClient`.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect now instead of at the first submit; see :meth:`Client.start`."""
        if not self._core.started:
            await asyncio.to_thread(self._core.start)

    async def submit(self, *, retries: RetryPolicy | None = None, **fields: Unpack[RequestFields]) -> AsyncHandle:
        """Publish one request; returns before it is acknowledged. See :meth:`Client.submit`."""
        return await self.submit_request(build_request(**fields), retries=retries)

    async def submit_request(self, request: InferenceRequest, *, retries: RetryPolicy | None = None) -> AsyncHandle:
        """Publish a request that was built elsewhere; otherwise like ``submit``."""
        core = self._core
        await self.start()
        encoded = core.encode(request)
        size = len(encoded.value)
        if not core.window.try_acquire(size) and not await self._wait_for_room(size):
            raise core.no_room()
        return core.publish(encoded, retries, AsyncHandle)

    def stream(
        self, *, timeout: float | None = None, retries: RetryPolicy | None = None, **fields: Unpack[RequestFields]
    ) -> AsyncTextStream:
        """Publish a request and iterate its answer as it is made; see :meth:`Client.stream`.

        Nothing is sent, nor checked any further, until the stream is entered, iterated or asked for its reply.

        .. code-block:: python

            async for delta in client.stream(model="smollm2-135m-instruct", prompt="The capital of France is"):
                print(delta, end="", flush=True)
        """
        return self._stream(build_request(**fields), timeout, partial(self.submit_request, retries=retries))

    def conversation(self, *, system: str | None = None, **fields: Unpack[RequestFields]) -> AsyncConversation:
        """A conversation, to go on with turn by turn; see :meth:`Client.conversation`.

        .. code-block:: python

            talk = client.conversation(model="smollm2-135m-instruct", max_tokens=64)
            print((await talk.ask("What is the capital of France?")).output.text)
        """
        return AsyncConversation(self.submit_request, self._stream, system, fields)

    async def submit_many(self, items: Iterable[SubmitItem] | AsyncIterable[SubmitItem]) -> AsyncIterator[AsyncHandle]:
        """Publish requests as fast as the bounds allow, lazily; see :meth:`Client.submit_many`.

        .. code-block:: python

            async for handle in client.submit_many(requests):
                handles.append(handle)
        """
        index = 0
        async for item in _each(items):
            with noted(f"item {index} of submit_many"):
                handle = await self.submit_request(self._request_of(item))
            index += 1
            yield handle

    def map(
        self,
        items: Iterable[SubmitItem] | AsyncIterable[SubmitItem],
        *,
        ordered: bool = True,
        ahead: int = 1_000,
        timeout: float | None = None,
        retries: RetryPolicy | None = None,
    ) -> AsyncGenerator[tuple[SubmitItem, InferenceReply], None]:
        """Publish requests, and yield each with its final reply; see :meth:`Client.map`.

        .. code-block:: python

            async for request, reply in client.map(requests, ordered=False):
                await keep(request, reply)

        A loop that is left with ``break`` leaves its generator open; :func:`contextlib.aclosing` closes it there and
        then, which cancels the rest.
        """
        return self._map(_each(items), ordered, self._bounded(ahead), timeout, retries)

    async def _map(
        self,
        items: AsyncIterator[SubmitItem],
        ordered: bool,
        ahead: int,
        timeout_s: float | None,
        retries: RetryPolicy | None,
    ) -> AsyncGenerator[tuple[SubmitItem, InferenceReply], None]:
        open_rows: dict[int, tuple[SubmitItem, AsyncHandle]] = {}
        answered: asyncio.Queue[int] = asyncio.Queue()
        index = -1
        more = True
        try:
            while True:
                while more and len(open_rows) < ahead:
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        more = False
                        break
                    index += 1
                    with noted(f"item {index}"):
                        handle = await self.submit_request(self._request_of(item), retries=retries)
                    open_rows[index] = item, handle
                    if not ordered:
                        handle.replied.when_done(from_any_thread(partial(answered.put_nowait, index)))
                if not open_rows:
                    return
                try:
                    async with asyncio.timeout(timeout_s):
                        first = next(iter(open_rows)) if ordered else await answered.get()
                except TimeoutError:
                    raise self._none_in_time(len(open_rows), timeout_s) from None
                item, handle = open_rows[first]
                with noted(f"item {first}"):
                    reply = await handle.reply(timeout_s)
                del open_rows[first]
                yield item, reply
        finally:
            for _, handle in open_rows.values():
                with suppress(FairlaneError):
                    handle.cancel()

    async def feedback(self, request_id: str, **fields: Unpack[FeedbackFields]) -> None:
        """Say how good the output of a request was; returns when that is in the log. See :meth:`Client.feedback`.

        .. code-block:: python

            await client.feedback(reply.request_id, score=0.25, tags=["wrong-fact"])
        """
        given = build_feedback(request_id, **fields)
        await self.start()
        publisher = self._core.publisher
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await asyncio.wrap_future(publisher.publish_feedback(given))
        except TimeoutError:
            raise publisher.not_confirmed(request_id) from None

    def replies(self, group_id: str, **options: Unpack[ReplyOptions]) -> "AsyncReplyStream":
        """Read a reply topic as a member of a group; see :meth:`Client.replies`.

        .. code-block:: python

            async with client.replies("billing", service="billing") as replies:
                async for reply in replies:
                    await book(reply.request_id, reply.usage)
        """
        return AsyncReplyStream(self._member(group_id, options))

    def serve_replies(
        self, group_id: str, handler: AsyncReplyHandler, **options: Unpack[ServiceOptions[AsyncOnDeadLetter]]
    ) -> AsyncReplyService:
        """A loop that gives each reply of a topic to a coroutine function; see :meth:`Client.serve_replies`.

        .. code-block:: python

            await client.serve_replies("billing", book, service="billing").run()
        """
        member, retries, letters = self._served(group_id, options)
        stream, callback = AsyncReplyStream(member), options.get("on_dead_letter")
        return AsyncReplyService(member, stream, handler, retries, letters, callback, self._start_timeout_s)

    async def flush(self, timeout: float | None = None) -> int:
        """Wait until every request is acknowledged or refused; see :meth:`Client.flush`."""
        return await asyncio.to_thread(self._core.flush, -1 if timeout is None else timeout)

    async def close(self) -> None:
        """Flush, within the close timeout, then stop. Handles still open get ClientClosed. May be called again."""
        for member in list(self._members):
            await asyncio.to_thread(member.close)
        await asyncio.to_thread(self._core.close)

    def _stream(
        self,
        request: InferenceRequest,
        timeout: float | None,
        submit: Callable[[InferenceRequest], Awaitable[AsyncHandle]],
    ) -> AsyncTextStream:
        return AsyncTextStream(self._core, streamed(request, self.reply_topic), timeout, submit)

    async def _wait_for_room(self, size_bytes: int) -> bool:
        window = self._core.window
        woken, wake = waker()
        ticket = window.enqueue(size_bytes, wake)
        try:
            await asyncio.wait_for(woken, self._core.limits.submit_timeout_ms / 1_000)
        except TimeoutError:
            pass
        except BaseException:  # cancelled: the place in the line must not be lost with the task
            window.dequeue(ticket)
            raise
        return window.claim(ticket)


class AsyncReplyStream(BaseReplyStream):
    """The replies of a topic, one by one; see :class:`ReplyStream`. For one task at a time.

    A cancelled ``anext`` loses nothing: the next one returns its reply.
    """

    def __init__(self, member: GroupMember) -> None:
        super().__init__(member)
        # A thread of its own: the default pool is small, and each stream would hold one of its threads for ever.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fairlane-reply-stream")
        self._fetch: Future[Any] | None = None
        self._finalizer = weakref.finalize(self, _abandon, member, self._thread)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceReply:
        """The next reply; the one before it counts as done from now on. See :meth:`ReplyStream.__next__`."""
        reply = await self._fetched(self._member.next)
        if reply is None:
            raise StopAsyncIteration
        return reply

    async def next_record(self) -> InferenceReply | UndecodableReply | None:
        """For :class:`AsyncReplyService`: the next record, whether it is a reply or not; None at the end."""
        return await self._fetched(self._member.next_record)

    async def _fetched(self, read: Callable[[], T | None]) -> T | None:
        if not self._finalizer.alive:
            return None
        if self._fetch is None:
            self._fetch = self._thread.submit(read)
        # Shielded, because the thread goes on when this task is cancelled, and its reply belongs to the next call.
        fetch: Future[T | None] = self._fetch
        try:
            found = await asyncio.shield(asyncio.wrap_future(fetch))
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._fetch = None
            raise
        self._fetch = None
        return found

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

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def _abandon(member: GroupMember, thread: ThreadPoolExecutor) -> None:
    member.stop()
    thread.submit(member.close)
    thread.shutdown(wait=False)


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def async_replies(
    group_id: str,
    handler: AsyncReplyHandler,
    *,
    tenant: str,
    bootstrap_servers: str | None = None,
    settings: KafkaSettings | None = None,
    **options: Unpack[ServiceOptions[AsyncOnDeadLetter]],
) -> AsyncReplyService:
    """:func:`replies` for asyncio: the handler and ``on_dead_letter`` are coroutine functions, ``run`` is awaited.

    .. code-block:: python

        await fairlane.async_replies("billing", book, tenant="acme", service="billing").run()
    """
    return AsyncClient(tenant, bootstrap_servers, settings=settings).serve_replies(group_id, handler, **options)
