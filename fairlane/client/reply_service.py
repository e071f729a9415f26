"""Reply service: a handler over the replies of a topic, at least once, with bounded retries and dead letters."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING
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
    """Shared part of both services, without waiting."""

    def __init__(
        self, member: GroupMember, retries: HandlerRetries, letters: ReplyLetters | None, start_timeout_s: float
    ) -> None:
        self._member = member
        self._retries = retries
        self._letters = letters
        self._start_timeout_s = start_timeout_s

    @property
    def topic(self) -> str:
        """The reply topic it reads."""
        return self._member.topic

    @property
    def dead_letter_topic(self) -> str | None:
        """Topic of replies that the service cannot handle; None with a callback instead."""
        return None if self._letters is None else self._letters.topic

    def _begin(self) -> None:
        if self._letters is not None:
            self._letters.check(self._start_timeout_s)

    def _end(self) -> None:
        if self._letters is not None:
            self._letters.close()

    def _timed(self) -> AbstractContextManager[object]:
        return metrics.REPLY_HANDLER_SECONDS.labels(topic=self.topic).time()

    def _wait_s(self, reply: InferenceReply, error: Exception, failures: int) -> float | None:
        metrics.REPLY_HANDLER_FAILURES.labels(topic=self.topic).inc()
        # The class alone: the text of an error may quote the reply.
        log.warning(
            "reply_handler_failed topic=%s request_id=%s error=%s failures=%d",
            self.topic,
            reply.request_id,
            type(error).__name__,
            failures,
        )
        return self._retries.wait_s(failures, random.random())  # noqa: S311 - jitter, not a secret

    def _failed(self, reply: InferenceReply, error: Exception) -> DeadLetter:
        record = self._member.latest
        assert record is not None  # noqa: S101 - a mistake in this package, not of a caller
        return DeadLetter(record, reply, error)

    def _undecodable(self, bad: UndecodableReply) -> DeadLetter:
        log.warning(
            "reply_undecodable topic=%s partition=%d offset=%d problem=%s",
            bad.topic,
            bad.partition,
            bad.offset,
            bad.problem,
        )
        return DeadLetter(bad, None, UndecodableReplyError(bad.why or bad.problem))

    def _keep(self, letter: DeadLetter) -> None:
        assert self._letters is not None  # noqa: S101 - a mistake in this package, not of a caller
        self._letters.keep(letter, self._retries.tries)

    def _count(self, result: str) -> None:
        metrics.REPLIES_SERVED.labels(topic=self.topic, result=result).inc()


class ReplyService(_Service):
    """Gives every reply of a topic to a handler, one after the other. Made by :meth:`Client.serve_replies`.

    .. code-block:: python

        service = client.serve_replies("billing", book, service="billing")
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.run()

    A reply is done when the handler returned, or when it is a dead letter. What was not done when the service ended,
    however it did, is given to the handler again: at least once, so the handler must bear to see a reply twice.
    """

    def __init__(
        self,
        member: GroupMember,
        handler: ReplyHandler,
        retries: HandlerRetries,
        letters: ReplyLetters | None,
        on_dead_letter: OnDeadLetter | None,
        start_timeout_s: float,
    ) -> None:
        super().__init__(member, retries, letters, start_timeout_s)
        self._handler = handler
        self._on_dead_letter = on_dead_letter
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve on this thread until ``stop``, the idle timeout, or an error. Once.

        Raises:
            Unavailable: a topic is not there or may not be used, the group is not reachable, or a dead letter could
                not be kept. The reply in work comes again.
            Exception: what ``on_dead_letter`` raised; likewise.
        """
        try:
            self._begin()
            while (found := self._member.next_record()) is not None:
                if isinstance(found, UndecodableReply):
                    self._give_up(self._undecodable(found))
                elif not self._handled(found):
                    break
        finally:
            self._member.close()
            self._end()

    def stop(self) -> None:
        """End ``run``, from any thread or a signal handler: after the reply in work, whose further tries are left to
        the next service."""
        self._stopping.set()
        self._member.stop()

    def _handled(self, reply: InferenceReply) -> bool:
        """Whether it is done; False when the service was stopped before it was."""
        failures = 0
        while True:
            try:
                with self._timed(), continued(self._member.trace):
                    self._handler(reply)
            except Exception as error:  # noqa: BLE001 - tried again, then kept
                failures += 1
                wait_s = self._wait_s(reply, error, failures)
                if wait_s is None:
                    self._give_up(self._failed(reply, error))
                    return True
                if self._stopped_within(wait_s):
                    return False
            else:
                self._count(HANDLED)
                return True

    def _stopped_within(self, wait_s: float) -> bool:
        # Not Event.wait: a signal handler that calls stop would block for ever on the lock it holds.
        until = monotonic() + wait_s
        while not self._stopping.is_set() and (left_s := until - monotonic()) > 0:
            sleep(min(left_s, _LOOK_EVERY_S))
        return self._stopping.is_set()

    def _give_up(self, letter: DeadLetter) -> None:
        if self._on_dead_letter is None:
            self._keep(letter)
        else:
            self._on_dead_letter(letter)
        self._count(DEAD_LETTER)


class AsyncReplyService(_Service):
    """:class:`ReplyService` for asyncio, whose handler is a coroutine function. For one event loop.

    .. code-block:: python

        service = client.serve_replies("billing", book, service="billing")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.stop)
        await service.run()
    """

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
        super().__init__(member, retries, letters, start_timeout_s)
        self._stream = stream
        self._handler = handler
        self._on_dead_letter = on_dead_letter
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until ``stop``, the idle timeout, or an error; see :meth:`ReplyService.run`. A task that is cancelled
        here cancels the handler, and the reply in work comes again."""
        async with self._stream:
            try:
                await asyncio.to_thread(self._begin)
                while (found := await self._stream.next_record()) is not None:
                    if isinstance(found, UndecodableReply):
                        await self._give_up(self._undecodable(found))
                    elif not await self._handled(found):
                        break
            finally:
                self._end()

    def stop(self) -> None:
        """End ``run``, from its event loop: after the reply in work; see :meth:`ReplyService.stop`."""
        self._stopping.set()
        self._member.stop()

    async def _handled(self, reply: InferenceReply) -> bool:
        failures = 0
        while True:
            try:
                with self._timed(), continued(self._member.trace):
                    await self._handler(reply)
            except Exception as error:  # noqa: BLE001 - tried again, then kept
                failures += 1
                wait_s = self._wait_s(reply, error, failures)
                if wait_s is None:
                    await self._give_up(self._failed(reply, error))
                    return True
                if await self._stopped_within(wait_s):
                    return False
            else:
                self._count(HANDLED)
                return True

    async def _give_up(self, letter: DeadLetter) -> None:
        if self._on_dead_letter is None:
            await asyncio.to_thread(self._keep, letter)
        else:
            await self._on_dead_letter(letter)
        self._count(DEAD_LETTER)

    async def _stopped_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True
