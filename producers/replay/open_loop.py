"""Open loop: calls go out when they are due, whether or not earlier ones are answered."""

import asyncio
from collections.abc import Iterable

from producers.replay.caller import Caller, leave_when, wait_until
from producers.replay.plan import Call


async def play(calls: Iterable[Call], caller: Caller, stopping: asyncio.Event, *, max_in_flight: int) -> None:
    """Make the calls and wait for their ends.

    Args:
        calls: in the order in which they are due; taken one by one.
        caller: makes them.
        stopping: once it is set no more are made, and those under way are left.
        max_in_flight: most under way; what is due beyond it is left out, and counted.
    """
    under_way: set[asyncio.Task[None]] = set()
    caller.begin()
    async with asyncio.TaskGroup() as group:
        leaver = group.create_task(leave_when(stopping, under_way))
        for call in calls:
            if await wait_until(stopping, call.due_s - caller.elapsed_s()):
                break
            if len(under_way) >= max_in_flight:
                caller.leave_out(call)
            else:
                task = group.create_task(caller.make(call))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            # Even when it is behind, what has been answered meanwhile must be heard.
            await asyncio.sleep(0)
        if under_way:
            await asyncio.wait(under_way)
        leaver.cancel()
