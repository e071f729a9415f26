"""Reply service: a handler over the replies of a topic, at least once, with bounded retries and dead letters."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from time import monotonic, sleep
from typing import TYPE_CHECKING

from fairlane import metrics
from fairlane.client.group_member import GroupMember, UndecodableReply
from fairlane.client.handler_retries import HandlerRetries
from fairlane.client.ports import log
from fairlane.client.reply_letters import DeadLetter, ReplyLetters, UndecodableReplyError
from fairlane.client.tracing import continued
from fairlane.records import InferenceReply

if TYPE_CHECKING:
    from fairlane.client.aio import AsyncReplyStream

ReplyHandler = Callable[[InferenceReply], object]
"""Takes a reply; when it returns, the reply is done. It may be given a reply more than once."""

AsyncReplyHandler = Callable[[InferenceReply], Awaitable[object]]

OnDeadLetter = Callable[[DeadLetter], object]
"""Takes what the handler failed on at every try, and what is no reply, instead of the topic of dead letters."""

AsyncOnDeadLetter = Callable[[DeadLetter], Awaitable[object]]

HANDLED = "handled"
DEAD_LETTER = "dead_letter"

_LOOK_EVERY_S = 0.05


class _Service:
    """What does not wait."""

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
        """Where that goes which the service cannot take; None with a callback instead."""
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
        return DeadLetter(bad.record, None, UndecodableReplyError(bad.why or bad.problem))

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
