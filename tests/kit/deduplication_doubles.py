"""Finders of earlier requests, and a dispatcher that repeats one."""

import asyncio
from collections.abc import Awaitable, Callable

from fairlane.records import InferenceReply, SourceCoordinate
from stream_processors.dispatcher.deduplication.stage import ReplyUnknownError
from tests.kit.dispatcher_bench import Bench, request

FIRST = SourceCoordinate("requests.acme", 0, 77)


Find = Callable[[str, str, SourceCoordinate], Awaitable[InferenceReply | None]]


def repeated(*numbers: int, **settings: int) -> Bench:
    """These ids were seen before."""
    bench = Bench(**settings)
    bench.seen.firsts.update({request(number).request_id: FIRST for number in numbers})
    return bench


def later(bench: Bench, after_ms: int) -> None:
    """So much later, in an event loop of its own."""
    bench.now_ms += after_ms
    bench.new_loop()
    asyncio.run(bench.decide())


def finds(bench: Bench, find: Find) -> None:
    bench.archive.find = find  # type: ignore[assignment,method-assign]  # as the test says


async def away(_tenant: str, _request_id: str, _source: SourceCoordinate) -> InferenceReply | None:
    raise ReplyUnknownError("OperationalError")
