"""Who asks for the same at the same time shares one run, and nobody's leaving is the others' loss."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stream_processors.dispatcher.response_cache.singleflight import SharedRunCancelledError, Singleflight


class Runs:
    """Calls that begin at once and end when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        self.began.set()
        number = self.begun
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def asked(flights: Singleflight[str, int], runs: Runs, key: str, times: int) -> "list[asyncio.Task[int]]":
    """So many who ask, all waiting for a run that began."""
    tasks = [asyncio.create_task(flights.run(key, runs)) for _ in range(times)]
    await runs.began.wait()
    await turn()
    return tasks


async def turn() -> None:
    """Let all run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def scenario(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def within() -> None:
            async with asyncio.timeout(10):
                await test()

        asyncio.run(within())

    run.__name__ = test.__name__
    return run


@scenario
async def test_the_same_key_runs_once() -> None:
    flights, runs = Singleflight[str, int](), Runs()
    tasks = await asked(flights, runs, "a", 5)
    assert len(flights) == 1
    runs.may_end.set()
    assert await asyncio.gather(*tasks) == [1] * 5
    assert len(flights) == 0
    assert await flights.run("a", runs) == 2, "what is over is not remembered"


@scenario
async def test_other_keys_run_beside_it() -> None:
    flights, runs = Singleflight[str, int](), Runs()
    tasks = await asked(flights, runs, "a", 2) + await asked(flights, runs, "b", 2)
    runs.may_end.set()
    assert await asyncio.gather(*tasks) == [1, 1, 2, 2]


@scenario
async def test_the_first_may_leave_and_the_others_get_their_answer() -> None:
    flights, runs = Singleflight[str, int](), Runs()
    first, *others = await asked(flights, runs, "a", 3)
    first.cancel()
    await turn()
    assert first.cancelled()
    assert runs.cancelled == 0
    runs.may_end.set()
    assert await asyncio.gather(*others) == [1, 1]
    assert runs.begun == 1


@scenario
async def test_a_timeout_of_the_first_is_its_own() -> None:
    flights, runs = Singleflight[str, int](), Runs()

    async def impatient() -> int:
        async with asyncio.timeout(0.001):
            return await flights.run("a", runs)

    first = asyncio.create_task(impatient())
    (other,) = await asked(flights, runs, "a", 1)
    with pytest.raises(TimeoutError):
        await first
    runs.may_end.set()
    assert await other == 1


@scenario
async def test_a_run_that_nobody_waits_for_is_cancelled_and_the_next_starts_anew() -> None:
    flights, runs = Singleflight[str, int](), Runs()
    tasks = await asked(flights, runs, "a", 3)
    for task in tasks:
        task.cancel()
    await turn()
    assert runs.cancelled == 1
    assert len(flights) == 0
    runs.may_end.set()
    assert await flights.run("a", runs) == 2


@scenario
async def test_who_asks_while_a_run_is_being_cancelled_gets_a_run_of_their_own() -> None:
    flights, runs = Singleflight[str, int](), Runs()
    (only,) = await asked(flights, runs, "a", 1)
    only.cancel()
    next_one = asyncio.create_task(flights.run("a", runs))
    await turn()
    runs.may_end.set()
    assert await next_one == 2


@scenario
async def test_an_error_reaches_all() -> None:
    flights = Singleflight[str, int]()
    may_end = asyncio.Event()

    async def fail() -> int:
        await may_end.wait()
        raise ValueError("no")

    tasks = [asyncio.create_task(flights.run("a", fail)) for _ in range(3)]
    await turn()
    may_end.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [ValueError] * 3
    assert len(flights) == 0


@scenario
async def test_a_run_that_cancels_itself_is_an_error_and_no_cancellation() -> None:
    flights = Singleflight[str, int]()

    async def give_up() -> int:
        raise asyncio.CancelledError

    found = await asyncio.gather(*(flights.run("a", give_up) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in found] == [SharedRunCancelledError] * 2


@scenario
async def test_beyond_the_bound_everybody_runs_alone() -> None:
    flights, runs = Singleflight[str, int](most=1), Runs()
    tasks = await asked(flights, runs, "a", 2) + await asked(flights, runs, "b", 2)
    assert runs.begun == 3
    assert len(flights) == 1
    runs.may_end.set()
    assert await asyncio.gather(*tasks) == [1, 1, 2, 3]


@scenario
async def test_an_error_that_nobody_waits_for_is_not_complained_about() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    flights = Singleflight[str, int]()

    async def fail_when_cancelled() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("no") from None
        return 0

    task = asyncio.create_task(flights.run("a", fail_when_cancelled))
    await turn()
    task.cancel()
    await turn()
    del task
    assert complaints == []
