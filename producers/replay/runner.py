"""Runs a load test: signals, target, clock."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from producers.replay.caller import Caller
from producers.replay.report import Report, Tallies
from producers.replay.target import Target

Load = Callable[[Caller, asyncio.Event], Coroutine[Any, Any, None]]
"""Makes calls until there are no more, or the event is set."""


def run(target: Target, tenants: Sequence[str], timeout_s: float, load: Load) -> Report:
    """Run a load to its end, or to the first SIGINT or SIGTERM, and say what came of it.

    Args:
        target: where calls go; closed in the end.
        tenants: in whose names there are calls.
        timeout_s: how long a call has, from when it is due.
        load: makes the calls.
    """
    return asyncio.run(_run(target, tenants, timeout_s, load))


async def _run(target: Target, tenants: Sequence[str], timeout_s: float, load: Load) -> Report:
    tallies = Tallies(tenants, timeout_s)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        await target.start()
        caller = Caller(target, tallies, timeout_s)
        await load(caller, stopping)
        elapsed_s = caller.elapsed_s()
    finally:
        await target.close()
    return tallies.report(elapsed_s, interrupted=stopping.is_set())
