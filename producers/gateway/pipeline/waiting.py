"""Waiter for the reply to an accepted request."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.client.reassembly import TextDelta
from fairlane.records import InferenceReply
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.call_context import CallContext
from producers.gateway.pipeline.pending import WaitingCall
from producers.openai_api.gateway_error import GatewayError

FindReply = Callable[[str, str], Awaitable[InferenceReply | None]]
"""Finds the recorded reply by tenant and request id; None if there is none. If it raises, it is called again."""

LOOK_UPS = 8
"""Concurrent look-ups of all calls of a process."""

_LOOK_UP_TIMEOUT_S = 3.0


class Desk(Protocol):
    """The part of ``LogSubmitter`` that a waiter uses."""

    @property
    def find_reply(self) -> FindReply: ...

    @property
    def look_ups(self) -> asyncio.Semaphore: ...

    @property
    def lines(self) -> LimitedLog:
        """Rate-limited log, for failures that many calls meet at once."""
        ...

    def leave(self, call: WaitingCall) -> None:
        """Remove the call. Idempotent."""
        ...

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request. Raises GatewayError."""
        ...


class KafkaPendingReply:
    """Implements ``producers.gateway.ports.PendingReply``."""

    def __init__(self, call: WaitingCall, desk: Desk, caller: CallContext | None) -> None:
        self._call = call
        self._desk = desk
        self._caller = caller
        self._backoff = Backoff(first_s=0.1, longest_s=3.0)
        self._look_ups = 0

    @property
    def request_id(self) -> str:
        return self._call.request_id

    async def reply(self, timeout_s: float) -> InferenceReply:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._call.reply is None:
            await self._news(deadline_s)
        self._note(self._call.reply)
        return self._call.reply

    async def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        if self._call.text is None:
            raise ValueError("parameters.stream: the request did not ask for a stream")
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            if (delta := self._call.take()) is not None:
                yield delta
            elif self._call.reply is not None:
                self._note(self._call.reply)
                return
            else:
                try:
                    await self._news(deadline_s)
                except TimeoutError:
                    if self._call.is_given_up or not self._call.still_comes():
                        raise
                    deadline_s = asyncio.get_running_loop().time() + timeout_s

    async def cancel(self) -> None:
        if self._call.reply is None:
            try:
                await self._desk.cancel(self._call.tenant, self.request_id)
            except GatewayError as error:
                self._desk.lines.warning("cancel_not_published", request_id=self.request_id, code=error.code)

    def forget(self) -> None:
        self._desk.leave(self._call)

    async def _news(self, deadline_s: float) -> None:
        """Return when something has changed, or may have. Raises TimeoutError: past the deadline, or given up."""
        # Taken before anything is awaited, so that no news is missed.
        news = self._call.news
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or self._call.is_given_up:
            raise TimeoutError
        if self._call.is_lost:
            await self._look_up(min(left_s, _LOOK_UP_TIMEOUT_S))
            left_s = min(left_s, self._backoff.delay_s(self._look_ups, random.random()))  # noqa: S311 - jitter
        if self._call.reply is None and not self._call.is_given_up:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def _look_up(self, timeout_s: float) -> None:
        """Look up the recorded reply: it may be in a partition that this instance does not read."""
        self._look_ups += 1
        try:
            async with asyncio.timeout(timeout_s) as bound:
                self._call.look_up = bound
                async with self._desk.look_ups:
                    found = await self._desk.find_reply(self._call.tenant, self.request_id)
        except Exception as error:  # noqa: BLE001 - of whatever kind: it is asked again until the caller's time is over
            metrics.GATEWAY_LOOK_UPS.labels(result="failed").inc()
            self._desk.lines.warning("reply_look_up_failed", request_id=self.request_id, error=type(error).__name__)
            return
        finally:
            self._call.look_up = None
        metrics.GATEWAY_LOOK_UPS.labels(result="missing" if found is None else "found").inc()
        if found is not None and found.tenant == self._call.tenant:
            self._call.settle(found)

    def _note(self, reply: InferenceReply) -> None:
        if self._caller is not None:
            self._caller.reply = reply
