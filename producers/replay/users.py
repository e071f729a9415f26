"""Closed loop: users who ask, wait, think and ask again, as in Locust."""

import asyncio
import random
from collections.abc import Sequence

from producers.replay.caller import Caller, leave_when, wait_until
from producers.replay.plan import Call
from producers.replay.profiles import Profile


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
