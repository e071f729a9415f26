"""Reply service: a handler over the replies of a topic, at least once, with bounded retries and dead letters."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane import metrics
from fairlane.client.connector import LETTER_TIMEOUT_MS, log
from fairlane.client.group_member import GroupMember, ReplyRecord, UndecodableReply
from fairlane.client.reader import existing_partitions
from fairlane.client.retry_policies import HandlerRetries
from fairlane.cluster import reason_of
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers, letter_content
from fairlane.errors import Unavailable
from fairlane.names import dead_letter_replies_topic
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.trace_context import continued

if TYPE_CHECKING:
    from fairlane.client.aio import AsyncReplyStream

T = TypeVar("T")

# The producer gives up first, and says why.
_WRITE_TIMEOUT_S = LETTER_TIMEOUT_MS / 1_000 + 2.0
_LETTER_POLL_S = 0.1


class HandlerFailedError(DeadLetterError):
    """A service's handler failed on this reply at every try."""


class UndecodableReplyError(DeadLetterError):
    """The record on the reply topic is not a valid reply."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record of a reply topic that a service cannot take. Of its content nothing is shown when this is printed.

    Attributes:
        record: the record as it came: ``topic``, ``partition``, ``offset``, ``timestamp_ms``, ``key``, ``value``.
        reply: the reply in it, which the handler failed on at every try; None in a record that is no reply.
        error: what the handler raised last; of a record that is no reply, an error that says why it is none.
    """

    record: ReplyRecord
    reply: InferenceReply | None = field(repr=False)
    error: Exception = field(repr=False)


class ReplyLetters:
    """Writer of dead letters: each is in the log before the call returns. For one thread at a time.

    Args:
        producer: owned from now on.
        tenant: whose service this is.
        group: the consumer group that could not handle them.
    """

    def __init__(self, producer: Producer, tenant: str, group: str) -> None:
        self.topic = dead_letter_replies_topic(tenant)
        self._producer = producer
        self._tenant = tenant
        self._signature = LetterWriter(f"{group}-{uuid4()}", group)

    def check(self, timeout_s: float) -> None:
        """Raises Unavailable when there is no such topic, it may not be used, or no broker answers."""
        try:
            existing_partitions(self._producer, self.topic, monotonic() + timeout_s)
        except KafkaException as error:
            raise Unavailable(f"no broker answers: {reason_of(error)}") from error

    def keep(self, letter: DeadLetter, tries: int) -> None:
        """Write a letter; a reply in it was tried ``tries`` times. Raises Unavailable when it is not acknowledged.

        Of a handler's error only the class is written: its text may quote the reply."""
        record, why, model = letter.record, letter.error, None if letter.reply is None else letter.reply.model
        if not isinstance(why, UndecodableReplyError):
            why = HandlerFailedError(f"{type(why).__name__} at each of {tries} tries")
        outcome: list[KafkaError | None] = []

        def reported(failure: KafkaError | None, _message: Message) -> None:
            outcome.append(failure)

        where = SourceCoordinate(record.topic, record.partition, record.offset)
        headers = dead_letter_headers(
            where, record.timestamp_ms or None, why, self._signature, tenant=self._tenant, model=model
        )
        key, value, headers = letter_content(record.key, record.value or b"", (*headers, *record.trace))
        try:
            self._producer.produce(self.topic, value, key or b"", headers=list(headers), on_delivery=reported)
        except (BufferError, KafkaException) as error:
            raise Unavailable(f"{self.topic}: {reason_of(error)}") from error
        deadline = monotonic() + _WRITE_TIMEOUT_S
        while not outcome and monotonic() < deadline:
            self._producer.poll(_LETTER_POLL_S)
        if not outcome:
            raise Unavailable(f"{self.topic}: no answer within {_WRITE_TIMEOUT_S:g} s")
        if outcome[0] is not None:
            raise Unavailable(f"{self.topic}: {outcome[0].str()}")

    def close(self) -> None:
        """Drop what was not acknowledged in time; no caller counts it as kept."""
        self._producer.purge()


ReplyHandler = Callable[[InferenceReply], object]
"""Takes a reply; when it returns, the reply is done. It may be given a reply more than once."""

AsyncReplyHandler = Callable[[InferenceReply], Awaitable[object]]

OnDeadLetter = Callable[[DeadLetter], object]
"""Takes replies that the handler failed on at every try, and records that are no reply, instead of the topic."""

AsyncOnDeadLetter = Callable[[DeadLetter], Awaitable[object]]

HANDLED = "handled"
DEAD_LETTER = "dead_letter"

_LOOK_EVERY_S = 0.05


class _Service:
    """The loop of both services. Its coroutines never suspend here; :class:`AsyncReplyService` overrides what waits."""

    _stopping: threading.Event | asyncio.Event

    def __init__(
        self,
        member: GroupMember,
        handler: Callable[[InferenceReply], Any],
        retries: HandlerRetries,
        letters: ReplyLetters | None,
        on_dead_letter: Callable[[DeadLetter], Any] | None,
        start_timeout_s: float,
    ) -> None:
        self._member = member
        self._handler = handler
        self._retries = retries
        self._letters = letters
        self._on_dead_letter = on_dead_letter
        self._start_timeout_s = start_timeout_s
        self._stopping = threading.Event()

    @property
    def topic(self) -> str:
        """The reply topic it reads."""
        return self._member.topic

    @property
    def dead_letter_topic(self) -> str | None:
        """Topic of replies that the service cannot handle; None with a callback instead."""
        return None if self._letters is None else self._letters.topic

    def stop(self) -> None:
        """End ``run`` after the reply in work, whose further tries are left to the next service. From any thread or a
        signal handler; an asyncio service from its event loop."""
        self._stopping.set()
        self._member.stop()

    async def _serve(self) -> None:
        try:
            if self._letters is not None:
                await self._block(self._letters.check, self._start_timeout_s)
            while (found := await self._next()) is not None:
                if isinstance(found, UndecodableReply):
                    log.warning(
                        "reply_undecodable topic=%s partition=%d offset=%d problem=%s",
                        found.topic,
                        found.partition,
                        found.offset,
                        found.problem,
                    )
                    error = UndecodableReplyError(found.why or found.problem)
                    await self._give_up(DeadLetter(found, None, error))
                elif not await self._handled(found):
                    break
        finally:
            if self._letters is not None:
                self._letters.close()

    async def _handled(self, reply: InferenceReply) -> bool:
        """Whether it is done; False when the service was stopped before it was."""
        failures = 0
        while True:
            try:
                with metrics.REPLY_HANDLER_SECONDS.labels(topic=self.topic).time(), continued(self._member.trace):
                    await self._call(self._handler, reply)
            except Exception as error:  # noqa: BLE001 - tried again, then kept
                failures += 1
                metrics.REPLY_HANDLER_FAILURES.labels(topic=self.topic).inc()
                # The class alone: the text of an error may quote the reply.
                log.warning(
                    "reply_handler_failed topic=%s request_id=%s error=%s failures=%d",
                    self.topic,
                    reply.request_id,
                    type(error).__name__,
                    failures,
                )
                wait_s = self._retries.wait_s(failures, random.random())  # noqa: S311 - jitter, not a secret
                if wait_s is None:
                    record = self._member.latest
                    assert record is not None  # noqa: S101 - a mistake in this package, not of a caller
                    await self._give_up(DeadLetter(record, reply, error))
                    return True
                if await self._stopped_within(wait_s):
                    return False
            else:
                metrics.REPLIES_SERVED.labels(topic=self.topic, result=HANDLED).inc()
                return True

    async def _give_up(self, letter: DeadLetter) -> None:
        if self._letters is not None:
            await self._block(partial(self._letters.keep, letter), self._retries.tries)
        elif self._on_dead_letter is not None:
            await self._call(self._on_dead_letter, letter)
        metrics.REPLIES_SERVED.labels(topic=self.topic, result=DEAD_LETTER).inc()

    async def _next(self) -> InferenceReply | UndecodableReply | None:
        return self._member.next_record()

    async def _call(self, function: Callable[[T], Any], argument: T) -> None:
        function(argument)

    async def _block(self, function: Callable[[T], None], argument: T) -> None:
        function(argument)

    async def _stopped_within(self, wait_s: float) -> bool:
        # Not Event.wait: a signal handler that calls stop would block for ever on the lock it holds.
        until = monotonic() + wait_s
        while not self._stopping.is_set() and (left_s := until - monotonic()) > 0:
            sleep(min(left_s, _LOOK_EVERY_S))
        return self._stopping.is_set()


class ReplyService(_Service):
    """Gives every reply of a topic to a handler, one after the other. Made by :meth:`Client.serve_replies`.

    .. code-block:: python

        service = client.serve_replies("billing", book, service="billing")
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.run()

    A reply is done when the handler returned, or when it is a dead letter. What was not done when the service ended,
    however it did, is given to the handler again: at least once, so the handler must bear to see a reply twice.
    """

    def run(self) -> None:
        """Serve on this thread until ``stop``, the idle timeout, or an error. Once.

        Raises:
            Unavailable: a topic is not there or may not be used, the group is not reachable, or a dead letter could
                not be kept. The reply in work comes again.
            Exception: what ``on_dead_letter`` raised; likewise.
        """
        try:
            with suppress(StopIteration):
                self._serve().send(None)
        finally:
            self._member.close()


class AsyncReplyService(_Service):
    """:class:`ReplyService` for asyncio, whose handler is a coroutine function. For one event loop.

    .. code-block:: python

        service = client.serve_replies("billing", book, service="billing")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.stop)
        await service.run()
    """

    _stopping: asyncio.Event

    def __init__(
        self,
        member: GroupMember,
        stream: "AsyncReplyStream",
        handler: AsyncReplyHandler,
        retries: HandlerRetries,
        letters: ReplyLetters | None,
        on_dead_letter: AsyncOnDeadLetter | None,
        start_timeout_s: float,
    ) -> None:
        super().__init__(member, handler, retries, letters, on_dead_letter, start_timeout_s)
        self._stream = stream
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until ``stop``, the idle timeout, or an error; see :meth:`ReplyService.run`. A task that is cancelled
        here cancels the handler, and the reply in work comes again."""
        async with self._stream:
            await self._serve()

    async def _next(self) -> InferenceReply | UndecodableReply | None:
        return await self._stream.next_record()

    async def _call(self, function: Callable[[T], Awaitable[object]], argument: T) -> None:
        await function(argument)

    async def _block(self, function: Callable[[T], None], argument: T) -> None:
        await asyncio.to_thread(function, argument)

    async def _stopped_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True
