"""The client for asyncio: the same core, its blocking parts kept off the event loop."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from fairlane.client.base import BaseClient, ReplyOptions, SubmitItem
from fairlane.client.conversation import AsyncConversation
from fairlane.client.handle import AsyncHandle, Handle, waker
from fairlane.client.mapping import each, replies_of_async
from fairlane.client.requests import RequestFields, build_request, streamed
from fairlane.client.retry_policies import HandlerRetries, RetryPolicy
from fairlane.client.text_stream import AsyncTextStream
from fairlane.records import InferenceReply, InferenceRequest

if TYPE_CHECKING:
    from fairlane.client.group_member import GroupMember, UndecodableReply
    from fairlane.client.reply_service import AsyncOnDeadLetter, AsyncReplyHandler, AsyncReplyService

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return AsyncHandle(await self._publish(request, retries))

    def stream(
        self, *, timeout: float | None = None, retries: RetryPolicy | None = None, **fields: Unpack[RequestFields]
    ) -> AsyncTextStream:
        """Publish a request and iterate its answer as it is made; see :meth:`Client.stream`.

        Nothing is sent, nor checked any further, until the stream is entered, iterated or asked for its reply.

        .. code-block:: python

            async for delta in client.stream(model="smollm2-135m-instruct", prompt="The capital of France is"):
                print(delta, end="", flush=True)
        """
        return self._stream(build_request(**fields), timeout, partial(self._publish, retries=retries))

    def conversation(self, *, system: str | None = None, **fields: Unpack[RequestFields]) -> AsyncConversation:
        """A conversation, to go on with turn by turn; see :meth:`Client.conversation`.

        .. code-block:: python

            talk = client.conversation(model="smollm2-135m-instruct", max_tokens=64)
            print((await talk.ask("What is the capital of France?")).output.text)
        """
        return AsyncConversation(self._publish, self._stream, system, fields)

    async def submit_many(self, items: Iterable[SubmitItem] | AsyncIterable[SubmitItem]) -> AsyncIterator[AsyncHandle]:
        """Publish requests as fast as the bounds allow, lazily; see :meth:`Client.submit_many`.

        .. code-block:: python

            async for handle in client.submit_many(requests):
                handles.append(handle)
        """
        index = 0
        async for item in each(items):
            try:
                handle = await self.submit_request(self._request_of(item))
            except Exception as error:
                error.add_note(f"item {index} of submit_many")
                raise
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
        if ahead < 1:
            raise ValueError(f"ahead: {ahead} is below 1")
        ahead = min(ahead, self._core.limits.max_in_flight)

        async def submit(item: SubmitItem) -> AsyncHandle:
            return await self.submit_request(self._request_of(item), retries=retries)

        return replies_of_async(submit, each(items), ordered=ordered, ahead=ahead, timeout_s=timeout)

    def replies(self, group_id: str, **options: Unpack[ReplyOptions]) -> "AsyncReplyStream":
        """Read a reply topic as a member of a group; see :meth:`Client.replies`.

        .. code-block:: python

            async with client.replies("billing", service="billing") as replies:
                async for reply in replies:
                    await book(reply.request_id, reply.usage)
        """
        return AsyncReplyStream(self._member(group_id, **options))

    def serve_replies(
        self,
        group_id: str,
        handler: "AsyncReplyHandler",
        *,
        retries: HandlerRetries | None = None,
        on_dead_letter: "AsyncOnDeadLetter | None" = None,
        **options: Unpack[ReplyOptions],
    ) -> "AsyncReplyService":
        """A loop that gives each reply of a topic to a coroutine function; see :meth:`Client.serve_replies`.

        .. code-block:: python

            await client.serve_replies("billing", book, service="billing").run()
        """
        from fairlane.client.reply_service import AsyncReplyService

        retries = retries or HandlerRetries()
        member, letters = self._served(group_id, retries, with_letters=on_dead_letter is None, **options)
        stream = AsyncReplyStream(member)
        return AsyncReplyService(member, stream, handler, retries, letters, on_dead_letter, self._start_timeout_s)

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
        publish: Callable[[InferenceRequest], Awaitable[Handle]],
    ) -> AsyncTextStream:
        return AsyncTextStream(self._core, streamed(request, self.reply_topic), timeout, publish)

    async def _publish(self, request: InferenceRequest, retries: RetryPolicy | None = None) -> Handle:
        core = self._core
        await self.start()
        prepared = core.prepare(request)
        size = len(prepared.value)
        if not core.window.try_acquire(size) and not await self._wait_for_room(size):
            raise core.no_room()
        return core.publish(prepared, retries)

    async def _wait_for_room(self, size_bytes: int) -> bool:
        window = self._core.window
        woken, wake = waker()
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
        self._fetch: Future[Any] | None = None
        self._finalizer = weakref.finalize(self, _abandon, member, self._thread)

    @property
    def topic(self) -> str:
        """The topic it reads."""
        return self._member.topic

    @property
    def undecodable(self) -> int:
        """Records that were not valid replies."""
        return self._member.undecodable

    @property
    def trace(self) -> dict[str, str]:
        """The trace context of the latest reply; see :attr:`ReplyStream.trace`."""
        return self._member.trace

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceReply:
        """The next reply; the one before it counts as done from now on. See :meth:`ReplyStream.__next__`."""
        reply = await self._fetched(self._member.next)
        if reply is None:
            raise StopAsyncIteration
        return reply

    async def next_record(self) -> "InferenceReply | UndecodableReply | None":
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _abandon(member: "GroupMember", thread: ThreadPoolExecutor) -> None:
    member.stop()
    thread.submit(member.close)
    thread.shutdown(wait=False)
