"""Calls of Redis that sessions and logins need: bounded in time, and refused while Redis is unavailable."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError, ResponseError

from fairlane.logs import get_logger
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.state import StateKind, count_refusal_of, refusal_of
from fairlane_server.store_error import StoreError

log = get_logger(__name__)


class SessionCalls:
    """Calls of one kind, for one event loop. ``timeout_s`` bounds each, connecting included."""

    def __init__(self, watch: RedisAvailability, timeout_s: float) -> None:
        self._turns = RedisCaller(watch, "sessions_unavailable")
        self._timeout_s = timeout_s
        self._refused = ""
        """Reason of the last refusal, until a call succeeds."""

    @property
    def answered(self) -> bool:
        """Whether Redis answered at the last opportunity."""
        return self._turns.answered

    async def __call__(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The answer. Raises StoreError, whose message quotes nothing."""
        if not self._turns.may_ask():
            raise StoreError("the Redis for state is unavailable")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await ask()
        except ResponseError as error:
            # An answer, which delayed nobody: a login that a full Redis refuses must not keep other calls from it.
            count_refusal_of(StateKind.SESSIONS, error)
            reason = refusal_of(error) or type(error).__name__
            if reason != self._refused:
                log.warning("sessions_unavailable", error=reason)
            self._refused = reason
            raise StoreError(f"the Redis for state refuses it: {reason}") from None
        except (RedisError, OSError, TimeoutError) as error:
            self._turns.failed(error)
            raise StoreError(f"the Redis for state does not answer: {type(error).__name__}") from None
        self._turns.succeeded()
        self._refused = ""
        return answer
