"""Whether Redis answers, found out by a task that nobody waits for."""

import asyncio
from random import random
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from fairlane.backoff import Backoff
from fairlane.logs import get_logger

log = get_logger(__name__)

_TIMEOUT_S = 0.25
_AGAIN = Backoff(first_s=0.25, longest_s=1.0)
_STEADY_S = 5.0
"""Who fails again sooner was not well: a PING may be answered while scripts are not."""
_REST_S = 2.0


class RedisWatch:
    """Shared by those whom requests wait for. The first call that fails is the last: from then on it is down, and asked
    by nothing but a task of the watch until that is answered. On one event loop.

    Args:
        redis: the client; its own time-outs apply as well.
        timeout_s: the longest a PING waits, connecting included.
        again: when a PING is sent after a failure.
    """

    def __init__(self, redis: "Redis", timeout_s: float = _TIMEOUT_S, again: Backoff = _AGAIN) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._again = again
        self._failures = 0
        """In a row."""
        self._up_at = monotonic()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.error = ""
        """The kind of the failure that it went down with, the last time."""

    @property
    def is_up(self) -> bool:
        """Whether to ask."""
        # Not a flag: a task that ended, however it did, leaves nobody who would take the flag back.
        return self._task is None or self._task.done()

    def failed(self, error: Exception) -> None:
        """A call came to nothing. Only within the event loop."""
        if isinstance(error, ResponseError) or not self.is_up or self._closed:
            # What Redis refuses it refuses at once, and what others ask maybe not at all.
            return
        if monotonic() - self._up_at > _STEADY_S:
            self._failures = 0
        self.error = type(error).__name__
        self._task = asyncio.create_task(self._ask_until_answered(), name="redis watch")
        self._task.add_done_callback(_ended)

    async def close(self) -> None:
        """From here on nothing is asked any more."""
        self._closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask_until_answered(self) -> None:
        # redis-py may swallow a cancellation that comes together with a reply: being told ends it.
        while not self._closed:
            self._failures += 1
            await asyncio.sleep(self._again.delay_s(self._failures, random()))  # noqa: S311 - jitter, no secret
            if await self._answers():
                self._up_at = monotonic()
                return

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.ping()
        except ResponseError:
            # An answer: of one who may not be asked this, say.
            return True
        except (RedisError, OSError, TimeoutError):
            return False
        return True


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("redis_watch_failed", kind=type(error).__name__)


class RedisTurns:
    """Whether one of those who share a watch asks Redis now, and one line in the log when it begins not to.

    Args:
        watch: of the Redis that it asks.
        event: what the log says.
    """

    def __init__(self, watch: RedisWatch, event: str) -> None:
        self._watch = watch
        self._event = event
        self._rests_until = 0.0
        self.answered = True
        """Whether it was, when something was last wanted of Redis."""

    def may_ask(self) -> bool:
        """Whether to ask now; if not, nobody waits for anything."""
        if not self._watch.is_up:
            self._not_answered(self._watch.error)
            return False
        return monotonic() >= self._rests_until

    def succeeded(self) -> None:
        """It was asked, and answered."""
        self.answered = True

    def failed(self, error: Exception) -> None:
        """It was asked in vain. Only within the event loop."""
        self._watch.failed(error)
        if isinstance(error, ResponseError):
            self._rests_until = monotonic() + _REST_S
        self._not_answered(type(error).__name__)

    def _not_answered(self, error: str) -> None:
        if self.answered:
            log.warning(self._event, error=error)
        self.answered = False
