"""Load loops: an open loop by due times, and a closed loop of users who wait and think."""

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from time import monotonic
from typing import Any

from producers.replay.calls import INTERRUPTED, NOT_SENT, TIMEOUT, Answer, Target
from producers.replay.profiles import Profile
from producers.replay.report import Ended, Report, Tallies
from producers.replay.trace import Call


class Caller:
    """Makes calls and tells the tallies what became of them."""

    def __init__(
        self, target: Target, tallies: Tallies, timeout_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """``timeout_s``: how long a call has, from when it is due."""
        self._target = target
        self._tallies = tallies
        self._timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock()

    def begin(self) -> None:
        """The run starts now."""
        self._started_s = self._clock()

    def elapsed_s(self) -> float:
        """Since the start of the run."""
        return self._clock() - self._started_s

    async def make(self, call: Call) -> None:
        """Make the call and wait for its end. When cancelled, it counts as interrupted."""
        sent_s = self.elapsed_s()
        left_s = call.due_s + self._timeout_s - sent_s
        if left_s <= 0:
            self.leave_out(call)
            return
        first_text_s: float | None = None

        def on_text() -> None:
            nonlocal first_text_s
            first_text_s = first_text_s or self.elapsed_s()

        answer = Answer(INTERRUPTED)
        try:
            async with asyncio.timeout(left_s):
                answer = await self._target.ask(call, left_s, on_text)
        except TimeoutError:
            answer = Answer(TIMEOUT)
        finally:
            self._tallies.add(Ended(call.tenant, call.due_s, sent_s, self.elapsed_s(), answer, first_text_s))

    def leave_out(self, call: Call) -> None:
        """It could not be made."""
        self._tallies.add(Ended(call.tenant, call.due_s, None, self.elapsed_s(), Answer(NOT_SENT)))


async def leave_when(stopping: asyncio.Event, under_way: Iterable[asyncio.Task[None]]) -> None:
    """Cancel what is under way once the run is to stop."""
    await stopping.wait()
    for task in tuple(under_way):
        task.cancel()


async def wait_until(stopping: asyncio.Event, seconds: float) -> bool:
    """Whether the run is to stop; known after ``seconds`` at the latest."""
    if seconds > 0 and not stopping.is_set():
        try:
            async with asyncio.timeout(seconds):
                await stopping.wait()
        except TimeoutError:
            return False
    return stopping.is_set()


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


class Users:
    """The users of a profile.

    Args:
        profile: how many there are when, and what they ask.
        tenants: in whose names they ask, in turn.
        caller: makes their calls.
        seed: of their pauses.
    """

    def __init__(self, profile: Profile, tenants: Sequence[str], caller: Caller, *, seed: int = 0) -> None:
        self._profile = profile
        self._tenants = tenants
        self._caller = caller
        self._random = random.Random(seed)  # noqa: S311 - pauses, and nothing secret
        self._calls = 0

    async def run(self, stopping: asyncio.Event) -> None:
        """From the first user to the last answer; when ``stopping`` is set, those under way are left."""
        users: dict[int, asyncio.Task[None]] = {}
        under_way: set[asyncio.Task[None]] = set()
        self._caller.begin()
        async with asyncio.TaskGroup() as group:
            leaver = group.create_task(leave_when(stopping, under_way))
            for stage in self._profile.stages:
                for user in range(stage.users):
                    if user not in users or users[user].done():
                        users[user] = task = group.create_task(self._user(user, stopping))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                if await wait_until(stopping, stage.seconds):
                    break
            if under_way:
                await asyncio.wait(under_way)
            leaver.cancel()

    async def _user(self, user: int, stopping: asyncio.Event) -> None:
        tenant = self._tenants[user % len(self._tenants)]
        # Not all at the same moment.
        stopped = await wait_until(stopping, self._random.uniform(0, self._profile.think_s))
        while not stopped and user < (self._profile.users_at(self._caller.elapsed_s()) or 0):
            self._calls += 1
            due_s = self._caller.elapsed_s()
            call = Call(self._calls, due_s, tenant, self._profile.prompt_tokens, self._profile.output_tokens)
            await self._caller.make(call)
            stopped = await wait_until(stopping, self._profile.think_s * self._random.uniform(0.5, 1.5))


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
