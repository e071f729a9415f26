"""Calls of Redis that sessions and logins need: bounded in time, and refused while Redis is unavailable."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.state import StateKind, count_refusal_of
from fairlane_server.store_error import StoreError


class SessionCalls:
    """Calls of one kind, for one event loop. ``timeout_s`` bounds each, connecting included."""

    def __init__(self, watch: RedisAvailability, timeout_s: float) -> None:
        self._turns = RedisCaller(watch, "sessions_unavailable")
        self._timeout_s = timeout_s

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
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.SESSIONS, error)
            self._turns.failed(error)
            raise StoreError(f"the Redis for state does not answer: {type(error).__name__}") from None
        self._turns.succeeded()
        return answer
