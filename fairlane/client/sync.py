"""The synchronous client."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self, Unpack

from fairlane.client.base import BaseClient, BaseReplyStream, ReplyOptions, ServiceOptions, SubmitItem, noted
from fairlane.client.conversation import Conversation
from fairlane.client.group_member import GroupMember
from fairlane.client.handle import Handle
from fairlane.client.publisher import CONFIRM_TIMEOUT_S
from fairlane.client.reply_service import OnDeadLetter, ReplyHandler, ReplyService
from fairlane.client.requests import RequestFields, build_request, streamed
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.text_stream import TextStream
from fairlane.closing import Closing
from fairlane.feedback import FeedbackFields, build_feedback
from fairlane.records import InferenceReply, InferenceRequest
from fairlane.settings import KafkaSettings


class Client(BaseClient, Closing):
    """Publishes a tenant's requests and waits for their replies. Thread-safe.

    >>> with Client(tenant="acme") as client:
    ...     handle = client.submit(model="smollm2-135m-instruct", messages=[{"role": "user", "content": "2 + 2 = ?"}])
    ...     print(handle.result(timeout=30).output.text)
    4

    Nothing is contacted until the first submit. Arguments: see :class:`fairlane.client.base.BaseClient`.
    """

    def start(self) -> None:
        """Connect now instead of at the first submit.

        Raises:
            Unavailable: no broker answers, or the reply topic is not there. It may be called again.
            ClientClosed: after ``close``.
        """
        self._core.start()

    def submit(self, *, retries: RetryPolicy | None = None, **fields: Unpack[RequestFields]) -> Handle:
        """Publish one request; returns before it is acknowledged. Fields: :class:`RequestFields`.

        ``retries`` says how often and how long it is tried again, instead of the client's own.

        >>> handle = client.submit(model="all-minilm-l6-v2", task="embed", texts=["a cat", "a dog"], timeout_ms=5_000)
        >>> len(handle.result(timeout=10).output.embeddings)
        2

        Raises:
            ValueError: the request has an obvious mistake; the message begins with the field. Nothing was sent.
            Backpressure: as much is under way as the client may hold, for all of its submit timeout.
            PublishFailed: the producer refused the request at once.
            Unavailable: no broker answers, the reply topic is not there, or a thread of the client died.
            ClientClosed: after ``close``.
        """
        return self.submit_request(build_request(**fields), retries=retries)

    def submit_request(self, request: InferenceRequest, *, retries: RetryPolicy | None = None) -> Handle:
        """Publish a request that was built elsewhere; otherwise like ``submit``.

        >>> request = InferenceRequest(new_request_id(), "digits", "classify", RequestInput(image=png))
        >>> client.submit_request(request).result(timeout=10).output.labels[0].label
        '7'
        """
        core = self._core
        core.start()
        encoded = core.encode(request)
        if not core.window.acquire(len(encoded.value), core.limits.submit_timeout_ms / 1_000):
            raise core.no_room()
        return core.publish(encoded, retries, Handle)

    def stream(
        self, *, timeout: float | None = None, retries: RetryPolicy | None = None, **fields: Unpack[RequestFields]
    ) -> TextStream:
        """Publish a request and iterate its answer as it is made: see :class:`TextStream`.

        >>> for delta in client.stream(model="smollm2-135m-instruct", prompt="The capital of France is"):
        ...     print(delta, end="", flush=True)
        Paris.

        Args:
            timeout: seconds to wait for each next piece of text, None for as long as it takes.
            retries: as for ``submit``.
            fields: those of ``submit``; the task is generate, and the reply comes to this client.

        Raises:
            The same as ``submit``.
        """
        return self._stream(build_request(**fields), timeout, partial(self.submit_request, retries=retries))

    def conversation(self, *, system: str | None = None, **fields: Unpack[RequestFields]) -> Conversation:
        """A conversation, to go on with turn by turn; what was said before is added by the service.

        >>> talk = client.conversation(model="smollm2-135m-instruct", max_tokens=64)
        >>> talk.ask("What is the capital of France?").output.text
        'The capital of France is Paris.'
        >>> talk.ask("And of Italy?").output.text
        'The capital of Italy is Rome.'

        Args:
            system: what every turn begins with, if it is given.
            fields: those of ``submit`` but for the input, for every turn; ``conversation_id`` names one to go on with,
                ``conversation_after`` the turn of it that was seen last.

        Raises:
            ValueError: a field is one of the input, or has a form that no record can hold.
        """
        return Conversation(self.submit_request, self._stream, system, fields)

    def submit_many(self, items: Iterable[SubmitItem]) -> Iterator[Handle]:
        """Publish requests, or mappings of the fields of ``submit``, as fast as the bounds allow.

        Lazy: it takes the next item when its handle is asked for, and waits while ``max_in_flight`` are unanswered, so
        an endless iterable takes bounded memory. The first error ends it; those submitted before stay submitted.

        >>> requests = ({"model": "all-minilm-l6-v2", "task": "embed", "texts": [text]} for text in ("a cat", "a dog"))
        >>> handles = list(client.submit_many(requests))
        >>> [handle.result(timeout=10).outcome for handle in handles]
        ['ok', 'ok']

        Raises:
            The same as ``submit``, with a note that says which item.
        """
        for index, item in enumerate(items):
            with noted(f"item {index} of submit_many"):
                handle = self.submit_request(self._request_of(item))
            yield handle

    def map(
        self,
        items: Iterable[SubmitItem],
        *,
        ordered: bool = True,
        ahead: int = 1_000,
        timeout: float | None = None,
        retries: RetryPolicy | None = None,
    ) -> Iterator[tuple[SubmitItem, InferenceReply]]:
        """Publish requests, and yield each with its final reply, whatever its outcome.

        Lazy: at most ``ahead`` requests are published and not yet yielded, so an endless iterable takes bounded memory.
        What was published and is not taken, because the loop was left or an error ended it, is cancelled.

        >>> requests = ({"model": "all-minilm-l6-v2", "task": "embed", "texts": [text]} for text in ("a cat", "a dog"))
        >>> for request, reply in client.map(requests):
        ...     print(request["texts"], reply.outcome)
        ['a cat'] ok
        ['a dog'] ok

        Args:
            items: requests, or mappings of the fields of ``submit``.
            ordered: in the order of ``items``; otherwise as they are answered.
            ahead: bound of those published and not yet yielded; ``max_in_flight`` is another.
            timeout: seconds to wait for the next reply before Timeout ends it, None for as long as it takes.
            retries: as for ``submit``.

        Raises:
            ValueError: ``ahead`` is below 1, or what ``submit`` says of an item.
            Timeout, PublishFailed, AnsweredElsewhere, Backpressure, Unavailable, ClientClosed: as ``submit`` and
                ``Handle.reply`` do, with a note that says which item.
        """
        return self._map(items, ordered, self._bounded(ahead), timeout, retries)

    def _map(
        self,
        items: Iterable[SubmitItem],
        ordered: bool,
        ahead: int,
        timeout_s: float | None,
        retries: RetryPolicy | None,
    ) -> Iterator[tuple[SubmitItem, InferenceReply]]:
        source = enumerate(items)
        open_rows: dict[int, tuple[SubmitItem, Handle]] = {}
        answered: SimpleQueue[int] = SimpleQueue()
        try:
            while True:
                while len(open_rows) < ahead and (row := next(source, None)) is not None:
                    index, item = row
                    with noted(f"item {index}"):
                        handle = self.submit_request(self._request_of(item), retries=retries)
                    open_rows[index] = item, handle
                    if not ordered:
                        handle.replied.when_done(partial(answered.put, index))
                if not open_rows:
                    return
                try:
                    index = next(iter(open_rows)) if ordered else answered.get(timeout=timeout_s)
                except Empty:
                    raise self._none_in_time(len(open_rows), timeout_s) from None
                item, handle = open_rows[index]
                with noted(f"item {index}"):
                    reply = handle.reply(timeout_s)
                del open_rows[index]
                yield item, reply
        finally:
            # No lock may be taken here: the garbage collector may close a dropped generator while any lock is held.
            for _, handle in open_rows.values():
                self._core.unwanted.put(handle)

    def feedback(self, request_id: str, **fields: Unpack[FeedbackFields]) -> None:
        """Say how good the output of a request was, or what it should have been; returns when that is in the log.

        The latest of each ``given_by`` about a request counts, and the same again moves its time. Feedback about a
        request of another tenant has no effect.

        >>> client.feedback(handle.request_id, thumb="down", correction="The capital of Australia is Canberra.")

        Args:
            request_id: a request of this tenant, from any of its clients.
            fields: :class:`FeedbackFields`.

        Raises:
            ValueError: a field is invalid; the message begins with its name. Nothing was sent.
            PublishFailed: the log did not take it.
            Backpressure, Unavailable, ClientClosed: as ``submit``.
        """
        given = build_feedback(request_id, **fields)
        self._core.start()
        publisher = self._core.publisher
        try:
            publisher.publish_feedback(given).result(CONFIRM_TIMEOUT_S)
        except TimeoutError:
            raise publisher.not_confirmed(request_id) from None

    def replies(self, group_id: str, **options: Unpack[ReplyOptions]) -> "ReplyStream":
        """Read a reply topic as a member of a group: for services that answer elsewhere than where they asked.

        Each reply is delivered at least once to the group: it counts as done when the next one is asked for, or with
        ``ack``; what was not done when the stream closed comes again. Options: :class:`ReplyOptions`.

        .. code-block:: python

            with client.replies("billing", service="billing") as replies:
                for reply in replies:
                    book(reply.request_id, reply.usage)

        Raises:
            ValueError: an option is wrong; the message begins with its name.
            ClientClosed: after ``close``.
        """
        return ReplyStream(self._member(group_id, options))

    def serve_replies(
        self, group_id: str, handler: ReplyHandler, **options: Unpack[ServiceOptions[OnDeadLetter]]
    ) -> ReplyService:
        """A loop that gives each reply of a topic to a handler, as a member of a group; ``run`` it.

        .. code-block:: python

            service = client.serve_replies("billing", lambda reply: book(reply.usage), service="billing")
            service.run()

        Args:
            group_id: of the consumer group ``<TOPIC_PREFIX>tenant_<tenant>.<group_id>``.
            handler: takes a reply, at least once. A call that raises is made again.
            options: :class:`ServiceOptions`.

        Raises:
            ValueError: an option is wrong; the message begins with its name.
            ClientClosed: after ``close``.
        """
        member, retries, letters = self._served(group_id, options)
        return ReplyService(member, handler, retries, letters, options.get("on_dead_letter"), self._start_timeout_s)

    def _stream(
        self, request: InferenceRequest, timeout: float | None, submit: Callable[[InferenceRequest], Handle]
    ) -> TextStream:
        return TextStream(self._core, streamed(request, self.reply_topic), timeout, submit)

    def flush(self, timeout: float | None = None) -> int:
        """Wait until every request is acknowledged or refused; how many are not yet after ``timeout`` seconds."""
        return self._core.flush(-1 if timeout is None else timeout)

    def close(self) -> None:
        """Flush, within the close timeout, then stop. Handles still open get ClientClosed. May be called again."""
        for member in list(self._members):
            member.close()
        self._core.close()


class ReplyStream(BaseReplyStream, Closing):
    """The replies of a topic, one by one; iterate it in one thread at a time, ``close`` it from any.

    Joins the group at the first ``next``. Leaving the loop with ``break`` and dropping the stream closes it too.
    """

    def __init__(self, member: GroupMember) -> None:
        super().__init__(member)
        self._finalizer = weakref.finalize(self, member.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferenceReply:
        """The next reply; the one before it counts as done from now on.

        Raises:
            StopIteration: the stream was closed, or idle for its idle timeout.
            Unavailable: the topic is not there, may not be read, or the group is not reachable.
        """
        reply = self._member.next()
        if reply is None:
            raise StopIteration
        return reply

    def ack(self) -> None:
        """The latest reply is done: commit that now, before the next one is asked for.

        Raises:
            Unavailable: the commit was refused or not answered; the reply may come again.
        """
        self._member.ack()

    def close(self) -> None:
        """Commit what is done and leave the group. The latest reply is not done unless ``ack`` said so."""
        self._finalizer()


def replies(
    group_id: str,
    handler: ReplyHandler,
    *,
    tenant: str,
    bootstrap_servers: str | None = None,
    settings: KafkaSettings | None = None,
    **options: Unpack[ServiceOptions[OnDeadLetter]],
) -> ReplyService:
    """A loop that gives each reply of a tenant's topic to a handler, at least once; ``run`` it.

    .. code-block:: python

        fairlane.replies("billing", book, tenant="acme", service="billing").run()

    :meth:`Client.serve_replies` of a client made for it; ``run`` closes all that it opened. Without ``topic`` or
    ``service`` it reads ``replies.<tenant>``.

    Args:
        group_id: as for ``serve_replies``.
        handler: as for ``serve_replies``.
        tenant: whose replies.
        bootstrap_servers: brokers to start from; default: ``KAFKA_BOOTSTRAP_SERVERS``.
        settings: the connection, with its security; default: from the environment.
        options: :class:`ServiceOptions`.

    Raises:
        ValueError: an argument is wrong; the message begins with its name.
        Unavailable: the settings of the connection are wrong.
    """
    return Client(tenant, bootstrap_servers, settings=settings).serve_replies(group_id, handler, **options)
