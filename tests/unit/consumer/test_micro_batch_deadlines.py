"""Deadlines in the micro-batcher: nobody is held past the point where they could still finish."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.received_work import ReceivedWork
from tests.kit.micro_batch_kit import MODEL, SMALL_MODEL, batcher, taken, work

MS_PER_TOKEN = 10
"""Of the engine that the batcher has measured in these tests. An item has 10 tokens, if nothing else is said."""
EARLY = 1.25


def measured(*items: ReceivedWork, limits: BatchLimits | None = None) -> MicroBatcher:
    """A batcher that knows how long runs take."""
    made = batcher(limits=limits or BatchLimits(max_items=4, max_tokens=1_000, timeout_ms=20))
    for model in (MODEL, SMALL_MODEL):
        for _ in range(20):
            made.ran(model, 1, 10, 10 * MS_PER_TOKEN / 1_000)
    for item in items:
        made.add(item)
    return made


def test_nobody_is_held_for_company_past_the_latest_start() -> None:
    made = measured(work(at_ms=0, deadline_at_ms=130))
    assert made.due_at_ms(idle=False) == 5, "a quarter more than it takes, before the deadline"
    assert made.next_batch(4, idle=False) is None
    assert len(taken(made.next_batch(5, idle=False))) == 1


def test_the_time_bound_holds_for_who_has_time() -> None:
    assert measured(work(at_ms=0, deadline_at_ms=1_000)).due_at_ms(idle=False) == 20


def test_what_cannot_finish_any_more_hurries_nobody() -> None:
    made = measured(work(at_ms=0, deadline_at_ms=50), work(at_ms=0, deadline_at_ms=10_000))
    assert made.next_batch(1, idle=False) is None
    assert made.due_at_ms(idle=False) == 20


def test_who_would_be_too_late_behind_a_larger_batch_goes_first() -> None:
    large, small = work(tokens=100, at_ms=0), work(at_ms=1, deadline_at_ms=500)
    made = measured(large, small)
    assert taken(made.next_batch(10, idle=True)) == (small,)
    assert taken(made.next_batch(110, idle=True)) == (large,)


@pytest.mark.parametrize("model", [MODEL, SMALL_MODEL])
def test_so_it_does_behind_another_model(model: tuple[str, str]) -> None:
    large, small = work(tokens=100, at_ms=0), work("low", at_ms=1, deadline_at_ms=500, model=model)
    assert taken(measured(large, small).next_batch(10, idle=True)) == (small,)


def test_who_has_time_waits_for_its_turn() -> None:
    large, small = work(tokens=100, at_ms=0), work(at_ms=1, deadline_at_ms=5_000)
    assert taken(measured(large, small).next_batch(10, idle=True))[0] == large


def test_the_one_whose_turn_it_is_is_not_made_late() -> None:
    large, small = work(tokens=100, at_ms=0, deadline_at_ms=1_300), work(at_ms=1, deadline_at_ms=500)
    assert taken(measured(large, small).next_batch(10, idle=True))[0] == large, "its latest start is 50"


def test_who_goes_first_takes_no_more_along_than_the_one_behind_can_wait_for() -> None:
    large = work("high", tokens=200, at_ms=0, deadline_at_ms=2_900)
    small = [work("low", at_ms=1, deadline_at_ms=900) for _ in range(4)]
    made = measured(large, *small)
    assert taken(made.next_batch(100, idle=True)) == tuple(small[:3]), "latest start 400, and 100 for each"


def test_a_priority_jumps_once_between_its_turns() -> None:
    """Low, always urgent, would have everything otherwise."""
    made = measured(limits=BatchLimits(max_items=1, max_tokens=1_000, timeout_ms=20))
    led = []
    for now_ms in range(0, 100_000, 1_000):
        made.take(lambda _work: True)
        made.add(work("high", tokens=100, at_ms=now_ms))
        made.add(work("low", at_ms=now_ms, deadline_at_ms=now_ms + 300))
        led.append(taken(made.next_batch(now_ms, idle=True))[0].item.priority_class)
    assert led.count("low") == pytest.approx(100 / 9, abs=2)


def test_a_batch_lets_everybody_in_it_finish() -> None:
    items = [work(at_ms=0, deadline_at_ms=250) for _ in range(4)]
    made = measured(*items)
    assert taken(made.next_batch(0, idle=True)) == tuple(items[:2])


def test_who_would_be_late_in_a_batch_but_not_alone_does_not_join_it() -> None:
    leader, hurried = work(at_ms=0, tokens=20), work(at_ms=1, deadline_at_ms=400)
    assert len(taken(measured(leader, hurried).next_batch(100, idle=True))) == 2
    assert len(taken(measured(leader, hurried).next_batch(101, idle=True))) == 1


def test_what_cannot_finish_any_more_is_still_run_until_its_deadline() -> None:
    """The dispatcher decided that it may."""
    made = measured(work(deadline_at_ms=50))
    assert len(taken(made.next_batch(10, idle=True))) == 1
    made.add(work(deadline_at_ms=50))
    assert made.next_batch(51, idle=True) is None


def test_but_it_leads_nobody_who_can_finish() -> None:
    hopeless, hopeful = work("high", at_ms=0, deadline_at_ms=150), work("low", at_ms=1)
    made = measured(hopeless, hopeful, limits=BatchLimits(max_items=1, max_tokens=1_000, timeout_ms=20))
    assert taken(made.next_batch(100, idle=True)) == (hopeful,)
    assert taken(made.next_batch(100, idle=True)) == (hopeless,)


def test_and_takes_only_room_that_nobody_else_needs() -> None:
    hopeless = work(at_ms=0, deadline_at_ms=150)
    hopeful = [work("low", at_ms=1) for _ in range(3)]
    made = measured(hopeless, *hopeful, limits=BatchLimits(max_items=3, max_tokens=1_000, timeout_ms=20))
    assert taken(made.next_batch(100, idle=True)) == tuple(hopeful)
    made = measured(hopeless, *hopeful)
    assert taken(made.next_batch(100, idle=True)) == (*hopeful, hopeless)


def test_hope_comes_back_when_the_engine_turns_out_faster() -> None:
    slow, other = work("high", at_ms=0, deadline_at_ms=190), work(at_ms=1)
    made = measured(slow, work(at_ms=0), other, limits=BatchLimits(max_items=1, max_tokens=1_000, timeout_ms=20))
    assert taken(made.next_batch(100, idle=True)) != (slow,)
    for _ in range(60):
        made.ran(MODEL, 1, 10, 0.02)
    assert taken(made.next_batch(120, idle=True)) == (slow,)


def test_a_continuous_engine_is_given_what_can_finish_first() -> None:
    hopeless, hopeful = work("high", at_ms=0, deadline_at_ms=150), work("low", at_ms=1)
    assert measured(hopeless, hopeful).take_for(MODEL, 100, 2, 1_000) == [hopeful, hopeless]


def test_what_cannot_finish_is_not_let_past_what_waits_for_room() -> None:
    large, hopeless = work(tokens=90, at_ms=0), work(at_ms=1, deadline_at_ms=150)
    assert measured(large, hopeless).take_for(MODEL, 100, 2, 80) == []


def test_nothing_is_known_of_an_engine_that_was_not_measured() -> None:
    made = batcher(work(at_ms=0, deadline_at_ms=5), work(at_ms=0))
    assert made.due_at_ms(idle=False) == 5
    assert len(taken(made.next_batch(5, idle=False))) == 2


@given(
    items=st.lists(
        st.tuples(st.sampled_from(("high", "normal", "low")), st.integers(1, 60), st.integers(0, 3_000)),
        min_size=1,
        max_size=30,
    ),
    step_ms=st.integers(0, 300),
)
def test_the_hopeless_never_lead_the_hopeful(items: list[tuple[str, int, int]], step_ms: int) -> None:
    """Nor is anybody hopeful made late by who is in the batch with them, nor held past the latest start."""
    made = measured(limits=BatchLimits(max_items=3, max_tokens=100, timeout_ms=20))
    waiting = {}
    for priority, tokens, deadline_at_ms in items:
        one = work(priority, tokens=tokens, deadline_at_ms=deadline_at_ms)
        made.add(one)
        waiting[one.claim] = one

    def slack_ms(one: ReceivedWork, now_ms: int, times: float = 1.0) -> float:
        return one.item.deadline_at_ms - now_ms - times * MS_PER_TOKEN * one.item.cost_tokens

    now_ms = 0
    while (batch := made.next_batch(now_ms, idle=True)) is not None:
        done_at_ms = now_ms + MS_PER_TOKEN * batch.cost_tokens
        leader = batch.work[0]
        alone_in_cell = len({one.item.cost_tokens for one in waiting.values()}) == 1
        if slack_ms(leader, now_ms) < -1 and alone_in_cell:
            assert all(slack_ms(one, now_ms, EARLY) < 1 for one in waiting.values() if one.item.cost_tokens > 0)
        if len(batch.work) > 1:
            for one in batch.work:
                if slack_ms(one, now_ms) >= 1 and one.item.deadline_at_ms >= now_ms:
                    assert done_at_ms <= one.item.deadline_at_ms + 1
        for one in batch.work:
            del waiting[one.claim]
        now_ms += max(step_ms, 1)
        for late in made.take_expired(now_ms):
            del waiting[late.claim]
        due_at_ms = made.due_at_ms(idle=False)
        hopeful = [one for one in waiting.values() if slack_ms(one, now_ms, EARLY) >= 1]
        if hopeful and alone_in_cell:
            assert due_at_ms is not None
            assert due_at_ms <= min(slack_ms(one, now_ms, EARLY) + now_ms for one in hopeful) + 1
    assert not waiting


def useful_share(*, measures: bool) -> float:
    """Under twice the load that the engine can bear: the part of its time that goes to who finishes in time."""
    random, made = Random(1), MicroBatcher(BatchLimits(max_items=8, max_tokens=10_000, timeout_ms=20))
    now_ms = useful_ms = next_at_ms = 0.0
    while now_ms < 200_000:
        while next_at_ms <= now_ms:
            made.add(
                work(at_ms=int(next_at_ms), tokens=100, deadline_at_ms=int(next_at_ms) + random.randint(200, 3_000))
            )
            next_at_ms += random.expovariate(1 / 50)
        made.take_expired(int(now_ms))
        batch = made.next_batch(int(now_ms), idle=True)
        if batch is None:
            now_ms = next_at_ms
            continue
        took_ms = 20 + len(batch.work) * 100
        if measures:
            made.ran(MODEL, len(batch.work), batch.cost_tokens, took_ms / 1_000)
        now_ms += took_ms
        useful_ms += 100 * sum(one.item.deadline_at_ms >= now_ms for one in batch.work)
    return useful_ms / now_ms


def test_an_overloaded_engine_works_for_those_who_can_finish() -> None:
    assert useful_share(measures=True) > 0.75
    assert useful_share(measures=False) < 0.5, "or the test shows nothing"
