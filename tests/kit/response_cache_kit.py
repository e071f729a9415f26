"""An answer that is kept, requests that ask for it, and what became of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fairlane import names
from fairlane.outcomes import CacheMode
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    Output,
    SourceCoordinate,
    TokenUsage,
    UsageEvent,
)
from fairlane.schema_files import default_codec
from fairlane_server.caching.responses import CachedAnswer, response_key
from stream_processors.dispatcher.feedback.work_records import WorkSeen
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, WorkId
from tests.kit.dispatcher_bench import MODEL, NOW_MS, PARTITION, Bench, request

ANSWER = CachedAnswer(
    request_id="00000000-0000-0000-0000-000000000077",
    model="words",
    model_version="1",
    task="generate",
    engine="simulated",
    output=Output(text="as before"),
    finish_reason="stop",
    usage=TokenUsage(7, 3),
    passages=(),
    finished_at_ms=NOW_MS - 500,
)


def asking(number: int = 1, **fields: Any) -> InferenceRequest:
    return request(number, **{"cache": CacheMode.EXACT, **fields})


def bytes_of(one: object) -> bytes:
    return default_codec().encode(one)


def keep(bench: Bench, tenant: str = "acme") -> None:
    key = response_key(tenant, asking(), MODEL.version, None)
    assert key is not None
    bench.kept.answers[key] = ANSWER


def replies(bench: Bench) -> list[InferenceReply]:
    return bench.decoded("replies.acme")


def work(bench: Bench) -> list[Any]:
    return bench.decoded(names.priority_topic("pool", "normal"))


def answered_once(bench: Bench) -> None:
    """The work of the request at offset 0 was read back, and is done."""
    place = WorkId(names.priority_topic("pool", "normal"), 0, 0)
    source = SourceCoordinate(*PARTITION, 0)
    usage = UsageEvent(
        asking().request_id, "acme", "pool", "words", "1", "normal", "ok", None, 7, 3, 0, 13, 5, NOW_MS,
        SourceCoordinate(*place),
    )  # fmt: skip
    bench.dispatcher.updates.learn([WorkSeen(place, Dispatched(source, "acme", "dispatcher-1", 13)), usage])


def going(bench: Bench, *steps: Callable[[], Awaitable[None] | None]) -> None:
    """The dispatcher runs, and does all it can between these steps."""

    async def run() -> None:
        for step in steps:
            made = step()
            if made is not None:
                await made
            await bench.decide()
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())


async def until(bench: Bench, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await bench.decide()
            await asyncio.sleep(0.001)
        await bench.decide()


def answers_of(bench: Bench, number: int) -> list[str]:
    """How this request was answered."""
    return [reply.outcome for reply in replies(bench) if reply.request_id == asking(number).request_id]


def without_consumers() -> Bench:
    """They are gone: what can wait does, and nothing is dispatched."""
    bench = Bench()
    bench.report()
    bench.now_ms += 5_000
    return bench
