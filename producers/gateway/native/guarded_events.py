"""End an event stream when the gateway drains, or when its caller loses its permission."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from random import random
from time import monotonic

from producers.gateway.native.follow import Event, EventName
from producers.openai_api.gateway_error import GatewayError

_NOT_ALLOWED = frozenset({401, 403})


async def watched(
    events: AsyncGenerator[Event, None],
    ending: asyncio.Event,
    check: Callable[[], Awaitable[object]],
    check_s: float,
) -> AsyncGenerator[Event, None]:
    """The events, until they end, the gateway drains or the caller loses its permission. Does not close ``events``.

    Raises GatewayError (401, 403) of ``check``; its other GatewayErrors say nothing about the caller and are ignored.

    Args:
        events: source of the events.
        ending: set when the gateway drains; the last event is then ``timeout``.
        check: raises if the caller may no longer listen.
        check_s: approximate interval between checks, in seconds.
    """
    ends = asyncio.ensure_future(ending.wait())
    coming: asyncio.Task[Event | None] | None = None
    check_at = _later(check_s)
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(events, None))
            timeout_s = max(0.0, check_at - monotonic())
            await asyncio.wait((coming, ends), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if monotonic() >= check_at:
                await _allowed(check)
                check_at = _later(check_s)
            if coming.done():
                told, coming = coming, None
                if (event := told.result()) is None:
                    return
                yield event
            elif ends.done():
                yield Event(EventName.TIMEOUT)
                return
    finally:
        waiting = [future for future in (coming, ends) if future is not None]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _allowed(check: Callable[[], Awaitable[object]]) -> None:
    try:
        await check()
    except GatewayError as error:
        if error.status in _NOT_ALLOWED:
            raise


def _later(check_s: float) -> float:
    """Time of the next check, with jitter: streams opened together must not check together."""
    return monotonic() + check_s * (0.75 + random() / 2)  # noqa: S311 - jitter, no secret
