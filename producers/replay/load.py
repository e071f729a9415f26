"""Load loops: an open loop by due times, and a closed loop of users who wait and think."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from producers.replay.calls import INTERRUPTED, NOT_SENT, TIMEOUT, CallOutcome
from producers.replay.profiles import Profile
from producers.replay.report import Report, Tallies
from producers.replay.targets import LoadTarget
from producers.replay.trace import Call


class Caller:
    """Makes calls and counts their outcomes. ``timeout_s``: time of a call, from when it is due."""

    def __init__(
        self, target: LoadTarget, tallies: Tallies, timeout_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._target = target
        self._tallies = tallies
        self._timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock()

    def begin(self) -> None:
        """Start of the run."""
        self._started_s = self._clock()

    def elapsed_s(self) -> float:
        """Since the start of the run."""
        return self._clock() - self._started_s

    async def make(self, call: Call) -> CallOutcome:
        """Make the call and wait for its end. When cancelled, it counts as interrupted."""
        sent_s = self.elapsed_s()
        left_s = call.due_s + self._timeout_s - sent_s
        if left_s <= 0:
            return self.leave_out(call)
        first_text_s: float | None = None

        def on_text() -> None:
            nonlocal first_text_s
            first_text_s = first_text_s or self.elapsed_s()

        outcome = CallOutcome(INTERRUPTED)
        try:
            async with asyncio.timeout(left_s):
                outcome = await self._target.ask(call, left_s, on_text)
        except TimeoutError:
            outcome = CallOutcome(TIMEOUT)
        finally:
            self._tallies.add(
                call.tenant,
                outcome,
                due_s=call.due_s,
                sent_s=sent_s,
                ended_s=self.elapsed_s(),
                first_text_s=first_text_s,
            )
        return outcome

    def leave_out(self, call: Call) -> CallOutcome:
        """Count a call that cannot be made."""
        outcome = CallOutcome(NOT_SENT)
        self._tallies.add(call.tenant, outcome, due_s=call.due_s, sent_s=None, ended_s=self.elapsed_s())
        return outcome

    def tried(self, tenant: str, tries: int, outcome: CallOutcome) -> None:
        """Count the outcome of a try, from 1, of an obedient user's question."""
        self._tallies.tried(tenant, tries, outcome)


Begin = Callable[[Coroutine[Any, Any, object]], asyncio.Task[object]]


@asynccontextmanager
async def _in_flight(stopping: asyncio.Event) -> AsyncIterator[tuple[set[asyncio.Task[object]], Begin]]:
    """Tasks in flight, and a function that begins one. Waits for them at the end; cancels them once ``stopping``."""
    in_flight: set[asyncio.Task[object]] = set()

    async def leave() -> None:
        await stopping.wait()
        for task in tuple(in_flight):
            task.cancel()

    async with asyncio.TaskGroup() as group:
        leaver = group.create_task(leave())

        def begin(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
            task = group.create_task(work)
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
            return task

        yield in_flight, begin
        if in_flight:
            await asyncio.wait(in_flight)
        leaver.cancel()


async def _wait(stopping: asyncio.Event, seconds: float) -> bool:
    """Whether the run is to stop; known after ``seconds`` at the latest."""
    if seconds > 0 and not stopping.is_set():
        try:
            async with asyncio.timeout(seconds):
                await stopping.wait()
        except TimeoutError:
            return False
    return stopping.is_set()


async def play(calls: Iterable[Call], caller: Caller, stopping: asyncio.Event, *, max_in_flight: int) -> None:
    """Make the calls when they are due and wait for their ends; those beyond ``max_in_flight`` only count as not sent.

    ``calls`` are taken one by one, in the order in which they are due. Once ``stopping`` is set, those in flight are
    cancelled.
    """
    caller.begin()
    async with _in_flight(stopping) as (in_flight, begin):
        for call in calls:
            if await _wait(stopping, call.due_s - caller.elapsed_s()):
                break
            if len(in_flight) >= max_in_flight:
                caller.leave_out(call)
            else:
                begin(caller.make(call))
            # Even when calls are behind their times, answers must be read.
            await asyncio.sleep(0)


async def run_users(
    profile: Profile, tenants: Sequence[str], caller: Caller, stopping: asyncio.Event, *, seed: int = 0
) -> None:
    """Run the users of a profile to their last answer. ``seed``: of their pauses. Once ``stopping`` is set, calls in
    flight are cancelled."""
    pauses = random.Random(seed)  # noqa: S311 - pauses, not secrets
    calls = 0

    async def ask(number: int, tenant: str) -> bool:
        """Ask a question until it is let in or given up. Returns whether the run has been stopped."""
        tries = 0
        while True:
            tries += 1
            call = Call(number, caller.elapsed_s(), tenant, profile.prompt_tokens, profile.output_tokens)
            outcome = await caller.make(call)
            if profile.obeys:
                caller.tried(tenant, tries, outcome)
            if not profile.asks_again(outcome.retry_after_s if outcome.shed else None, tries):
                return stopping.is_set()
            if await _wait(stopping, outcome.retry_after_s or 0.0):
                return True
            if profile.users_at(caller.elapsed_s()) is None:
                return False

    async def ask_and_think(user: int) -> None:
        nonlocal calls
        tenant = tenants[user % len(tenants)]
        # Not all at the same moment.
        stopped = await _wait(stopping, pauses.uniform(0, profile.think_s))
        while not stopped and user < (profile.users_at(caller.elapsed_s()) or 0):
            calls += 1
            stopped = await ask(calls, tenant) or await _wait(stopping, profile.think_s * pauses.uniform(0.5, 1.5))

    users: dict[int, asyncio.Task[object]] = {}
    caller.begin()
    async with _in_flight(stopping) as (_, begin):
        for stage in profile.stages:
            for user in range(stage.users):
                if user not in users or users[user].done():
                    users[user] = begin(ask_and_think(user))
            if await _wait(stopping, stage.seconds):
                break


def run(
    target: LoadTarget,
    tenants: Sequence[str],
    timeout_s: float,
    load: Callable[[Caller, asyncio.Event], Coroutine[Any, Any, None]],
) -> Report:
    """Run a load to its end, or to the first SIGINT or SIGTERM, which sets the event. Closes the target.

    ``timeout_s``: time of a call, from when it is due.
    """

    async def run_load() -> Report:
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

    return asyncio.run(run_load())
