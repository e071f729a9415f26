"""Blocking calls in a thread of their own."""

import asyncio
import threading

import pytest

from producers.admin.blocking import BUSY, Serial
from producers.openai_api.errors import GatewayError


def test_calls_run_one_after_another_and_too_many_are_refused() -> None:
    async def run() -> None:
        serial, gate, order = Serial("things", most_waiting=2), threading.Event(), list[int]()

        def first() -> None:
            gate.wait(30)
            order.append(1)

        waiting = [asyncio.create_task(serial.run(first)), asyncio.create_task(serial.run(lambda: order.append(2)))]
        await asyncio.sleep(0)
        with pytest.raises(GatewayError) as refused:
            await serial.run(lambda: order.append(3))
        assert (refused.value.status, refused.value.code) == (503, BUSY)
        gate.set()
        await asyncio.gather(*waiting)
        assert order == [1, 2]
        while True:
            # The count goes down behind the answer, on the loop.
            try:
                await serial.run(lambda: order.append(4))
                break
            except GatewayError:
                await asyncio.sleep(0)
        assert order == [1, 2, 4]
        await serial.close()

    asyncio.run(run())


def test_a_caller_that_leaves_does_not_free_the_thread() -> None:
    async def run() -> None:
        serial, gate, begun = Serial("things", most_waiting=1), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            gate.wait(30)

        left = asyncio.create_task(serial.run(work))
        await asyncio.to_thread(begun.wait, 30)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(GatewayError):
            await serial.run(lambda: None)
        gate.set()
        await serial.close()

    asyncio.run(run())


def test_errors_reach_the_caller() -> None:
    async def run() -> None:
        serial = Serial("things")

        def fail() -> None:
            raise ValueError("why")

        with pytest.raises(ValueError, match="why"):
            await serial.run(fail)
        await serial.close()

    asyncio.run(run())
