"""Availability of Redis, checked by a background task that delays no caller."""

import asyncio
from dataclasses import dataclass
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
"""A failure sooner than this after a recovery continues the backoff: PING may work while scripts do not."""
_REST_S = 2.0


class RedisAvailability:
    """Availability of one Redis, shared by its callers on the request path.

    The first failed call marks Redis as down. From then on only a task of the watch contacts it, until a PING is
    answered within ``timeout_s``; failed PINGs are repeated with the backoff ``again``. For one event loop.
    """

    def __init__(self, redis: "Redis", timeout_s: float = _TIMEOUT_S, again: Backoff = _AGAIN) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._again = again
        self._failures = 0
        """Consecutive failures."""
        self._up_at = monotonic()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.error = ""
        """Class name of the failure that last marked Redis as down."""

    @property
    def is_up(self) -> bool:
        # Not a flag: if the task ended unexpectedly, nothing would reset it.
        return self._task is None or self._task.done()

    def failed(self, error: Exception) -> None:
        """Report a failed call. Call only within the event loop."""
        if isinstance(error, ResponseError) or not self.is_up or self._closed:
            # A refusal delays nobody, and other callers' commands may not be refused.
            return
        if monotonic() - self._up_at > _STEADY_S:
            self._failures = 0
        self.error = type(error).__name__
        self._task = asyncio.create_task(self._ask_until_answered(), name="redis watch")
        self._task.add_done_callback(_ended)

    async def close(self) -> None:
        self._closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask_until_answered(self) -> None:
        # redis-py may swallow a cancellation that arrives with a reply: the flag ends the loop.
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
            # An error is an answer too, for instance when PING is not permitted.
            return True
        except (RedisError, OSError, TimeoutError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class WatchedRedis:
    """A client with the watch of its server, which go together; for one event loop."""

    client: "Redis"
    watch: RedisAvailability

    @classmethod
    def of(cls, client: "Redis | None", timeout_s: float) -> "WatchedRedis | None":
        """The client with a watch; None without a client."""
        return None if client is None else cls(client, RedisAvailability(client, timeout_s))

    async def close(self) -> None:
        await self.watch.close()
        await self.client.aclose()


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("redis_watch_failed", kind=type(error).__name__)


class RedisCaller:
    """One caller of a watched Redis: decides whether to call it now, and logs ``event`` once when it stops calling."""

    def __init__(self, watch: RedisAvailability, event: str) -> None:
        self._watch = watch
        self._event = event
        self._rests_until = 0.0
        self.answered = True
        """Whether Redis was called and answered at the last opportunity."""

    def may_ask(self) -> bool:
        """Whether to call Redis now; never waits."""
        if not self._watch.is_up:
            self._not_answered(self._watch.error)
            return False
        return monotonic() >= self._rests_until

    def succeeded(self) -> None:
        self.answered = True

    def failed(self, error: Exception) -> None:
        """Report a failed call. Call only within the event loop."""
        self._watch.failed(error)
        if isinstance(error, ResponseError):
            self._rests_until = monotonic() + _REST_S
        self._not_answered(type(error).__name__)

    def _not_answered(self, error: str) -> None:
        if self.answered:
            log.warning(self._event, error=error)
        self.answered = False
