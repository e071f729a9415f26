"""Requests with one cached answer, and what the dispatcher decides about them."""

import asyncio

from tests.kit.dispatcher_bench import Bench, encoded, request


def crowd(bench: Bench) -> None:
    """A pool of a small window, which one request fills for 130 ms: what comes next waits."""
    bench.report(100.0, tokens=5)
    bench.run(encoded(100, priority="high"))
    assert bench.dispatcher.scheduler.in_flight.tokens("pool") == 13


def after(bench: Bench, *values: bytes, offset: int = 10, topic: str = "requests.acme") -> None:
    """More records come, and are decided."""

    async def turn() -> None:
        for number, value in enumerate(values):
            await bench.write(offset + number, value, topic=topic)
        await bench.decide()

    asyncio.run(turn())


def decisions(bench: Bench) -> list[tuple[str, str]]:
    """Decision and the last digits of the request id, in the order in which they are written."""
    return [(event.decision, event.request_id.lstrip("0-")) for event in bench.audit()]


def id_of(number: int) -> str:
    return request(number).request_id
