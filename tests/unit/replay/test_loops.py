"""Calls at their times, users at theirs, and the end of a run, against a way in that does what a test says."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from producers.replay.calls import INTERRUPTED, NOT_SENT, OK, TIMEOUT, CallOutcome, OnText
from producers.replay.load import Caller, play, run, run_users
from producers.replay.profiles import MOST_TRIES, Profile, Stage
from producers.replay.report import Report, Tallies
from producers.replay.trace import Call
from tests.kit.waiting import eventually_async

_PATIENCE_S = 60.0

Asked = Callable[[Call], Awaitable[CallOutcome]]


class ScriptedTarget:
    """Answers as it is told; ``most`` is how many calls were under way at once."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.calls: list[Call] = []
        self.under_way = self.most = 0
        self.closed = False

    async def start(self) -> None: ...

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> CallOutcome:
        assert 0 < timeout_s <= _PATIENCE_S
        self.calls.append(call)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        on_text()
        try:
            return await self._asked(call)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        self.closed = True


async def at_once(_call: Call) -> CallOutcome:
    return CallOutcome(OK)


async def never(_call: Call) -> CallOutcome:
    await asyncio.Event().wait()
    raise AssertionError


def calls(count: int, every_s: float = 0.0) -> list[Call]:
    return [Call(number, number * every_s, "acme", 4, 4) for number in range(count)]


def report_of(
    target: ScriptedTarget,
    load: Callable[[Caller, asyncio.Event], Coroutine[Any, Any, None]],
    timeout_s: float = _PATIENCE_S,
) -> Report:
    return run(target, ("acme", "globex"), timeout_s, load)


def test_calls_go_out_when_they_are_due_and_not_before() -> None:
    target = ScriptedTarget(at_once)
    planned = calls(10, every_s=0.02)
    report = report_of(target, lambda caller, stopping: play(planned, caller, stopping, max_in_flight=100))

    assert target.calls == planned
    assert report.total.outcomes == {OK: 10}
    assert report.elapsed_s >= 0.18
    assert report.total.late_ms.p50 is not None
    assert report.total.first_text_ms.p50 is not None
    assert target.closed


def test_a_call_waits_for_no_other() -> None:
    """The first is answered when the last was sent: in a closed loop it would be the only one."""

    async def scenario(caller: Caller, stopping: asyncio.Event) -> None:
        await play(calls(8), caller, stopping, max_in_flight=100)

    last_sent = asyncio.Event()

    async def when_all_are_sent(call: Call) -> CallOutcome:
        if call.number == 7:
            last_sent.set()
        await last_sent.wait()
        return CallOutcome(OK)

    target = ScriptedTarget(when_all_are_sent)
    assert report_of(target, scenario).total.outcomes == {OK: 8}
    assert target.most == 8


def test_what_is_beyond_the_bound_is_left_out_and_counted() -> None:
    target = ScriptedTarget(never)

    async def scenario(caller: Caller, stopping: asyncio.Event) -> None:
        async def end() -> None:
            await eventually_async(lambda: target.under_way == 3)
            stopping.set()

        ending = asyncio.create_task(end())
        await play(calls(10), caller, stopping, max_in_flight=3)
        await ending

    report = report_of(target, scenario)
    assert report.total.outcomes == {INTERRUPTED: 3, NOT_SENT: 7}
    assert report.interrupted
    assert target.under_way == 0


def test_what_is_not_answered_in_time_is_left() -> None:
    target = ScriptedTarget(never)
    tallies = Tallies(("acme",), _PATIENCE_S)
    # By this clock no call is late before it is made, however long that takes.
    caller = Caller(target, tallies, _PATIENCE_S, clock=lambda: 0.0)
    planned = [Call(number, 0.05 - _PATIENCE_S, "acme", 1, 1) for number in range(3)]

    asyncio.run(play(planned, caller, asyncio.Event(), max_in_flight=10))

    assert tallies.report(0.0, interrupted=False).total.outcomes == {TIMEOUT: 3}
    assert target.under_way == 0


def test_a_call_whose_time_is_over_before_it_went_out_is_not_made() -> None:
    async def scenario(caller: Caller, stopping: asyncio.Event) -> None:
        await play([Call(0, -2.0, "acme", 1, 1)], caller, stopping, max_in_flight=1)

    target = ScriptedTarget(at_once)
    report = report_of(target, scenario, timeout_s=1.0)

    assert report.total.outcomes == {NOT_SENT: 1}
    assert not target.calls


def test_a_mistake_of_the_way_in_ends_the_run() -> None:
    async def broken(_call: Call) -> CallOutcome:
        raise LookupError("no such thing")

    target = ScriptedTarget(broken)
    with pytest.raises(ExceptionGroup) as caught:
        report_of(target, lambda caller, stopping: play(calls(2, 30.0), caller, stopping, max_in_flight=9))
    assert caught.group_contains(LookupError)
    assert target.closed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_early_with_a_report(number: signal.Signals) -> None:
    async def answered_then_killed(call: Call) -> CallOutcome:
        if call.number == 1:
            os.kill(os.getpid(), number)
            await never(call)
        return CallOutcome(OK)

    target = ScriptedTarget(answered_then_killed)
    planned = (Call(one, 0.0 if one < 2 else 3_600.0, "acme", 1, 1) for one in range(3))
    report = report_of(target, lambda caller, stopping: play(planned, caller, stopping, max_in_flight=9))

    assert report.interrupted
    assert report.total.outcomes == {OK: 1, INTERRUPTED: 1}
    assert target.closed


def profile(*stages: Stage, think_s: float = 0.001) -> Profile:
    return Profile("test", stages, think_s, prompt_tokens=5, output_tokens=6)


def test_users_ask_again_after_their_answers() -> None:
    async def twenty(_call: Call) -> CallOutcome:
        if len(target.calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return CallOutcome(OK)

    target = ScriptedTarget(twenty)
    users = profile(Stage(3_600, 4))
    report = report_of(target, lambda caller, stopping: run_users(users, ("acme", "globex"), caller, stopping))

    assert target.most <= 4
    assert report.total.calls == len(target.calls) >= 20
    assert {call.tenant for call in target.calls} == {"acme", "globex"}
    assert {(call.prompt_tokens, call.output_tokens) for call in target.calls} == {(5, 6)}
    assert len({call.number for call in target.calls}) == len(target.calls)


def test_users_come_and_go_with_the_stages() -> None:
    """In the first stage one user waits for its answer; then there are five; in the end they are gone."""
    now_s = 0.0
    release = asyncio.Event()

    async def when_five_wait(_call: Call) -> CallOutcome:
        nonlocal now_s
        if target.under_way >= 5:
            now_s = 99.0
            release.set()
        await release.wait()
        return CallOutcome(OK)

    async def scenario() -> None:
        nonlocal now_s
        running = asyncio.create_task(run_users(users, ("acme",), caller, asyncio.Event()))
        await asyncio.sleep(0)
        # By this clock the second stage lasts until all five have asked.
        now_s = 0.2
        await running

    target = ScriptedTarget(when_five_wait)
    users = profile(Stage(0.1, 1), Stage(0.2, 5), Stage(0.1, 1))
    tallies = Tallies(("acme",), _PATIENCE_S)
    caller = Caller(target, tallies, _PATIENCE_S, clock=lambda: now_s)
    asyncio.run(scenario())

    assert [call.due_s for call in target.calls] == [0.2] * 5
    assert target.most == 5
    assert tallies.report(1.0, interrupted=False).total.outcomes == {OK: 5}
    assert target.under_way == 0


def test_users_leave_when_the_run_is_ended() -> None:
    async def ended(call: Call) -> CallOutcome:
        if len(target.calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return await never(call)

    target = ScriptedTarget(ended)
    users = profile(Stage(3_600, 3))
    report = report_of(target, lambda caller, stopping: run_users(users, ("acme",), caller, stopping))

    assert report.interrupted
    assert report.total.outcomes == {INTERRUPTED: 3}


def test_tallies_and_the_clock_begin_together() -> None:
    now_s = 100.0
    caller = Caller(ScriptedTarget(at_once), Tallies(("acme",), 1.0), 1.0, clock=lambda: now_s)
    now_s = 130.0
    caller.begin()
    now_s = 131.5

    assert caller.elapsed_s() == 1.5


def test_users_who_obey_ask_again_at_the_time_they_were_told() -> None:
    shed = CallOutcome("overloaded", shed=True, retry_after_s=0.01)

    async def busy_at_first(call: Call) -> CallOutcome:
        seen[call.number] = seen.get(call.number, 0) + 1
        needed = 2 if call.number % 2 else 3
        return CallOutcome(OK) if seen[call.number] >= needed else shed

    seen: dict[int, int] = {}
    target = ScriptedTarget(busy_at_first)
    profile = Profile("overload", (Stage(1.0, 2),), think_s=0.01, obeys=True)
    report = report_of(target, lambda caller, stopping: run_users(profile, ("acme",), caller, stopping))

    assert {2, 3} <= set(seen.values()) <= {1, 2, 3}, "some were asked too late to be asked again"
    assert report.total.in_by_second_try == pytest.approx(0.5, abs=0.3)
    assert report.total.shed >= sum(seen.values()) - len(seen)
    assert report.tenants["globex"].in_by_second_try is None


def test_users_who_do_not_obey_ask_once() -> None:
    async def busy(_call: Call) -> CallOutcome:
        return CallOutcome("overloaded", shed=True, retry_after_s=0.01)

    target = ScriptedTarget(busy)
    profile = Profile("baseline", (Stage(0.1, 2),), think_s=0.01)
    report = report_of(target, lambda caller, stopping: run_users(profile, ("acme",), caller, stopping))

    assert len({call.number for call in target.calls}) == len(target.calls)
    assert report.total.in_by_second_try is None


def test_whoever_is_told_to_come_back_for_ever_gives_up() -> None:
    async def busy(_call: Call) -> CallOutcome:
        return CallOutcome("overloaded", shed=True, retry_after_s=0.0)

    target = ScriptedTarget(busy)
    profile = Profile("overload", (Stage(0.05, 1),), think_s=0.01, obeys=True)
    report = report_of(target, lambda caller, stopping: run_users(profile, ("acme",), caller, stopping))

    assert Counter(call.number for call in target.calls).most_common(1)[0][1] == MOST_TRIES
    assert report.total.in_by_second_try == 0.0
