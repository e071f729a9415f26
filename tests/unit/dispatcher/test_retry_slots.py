"""Refused requests are told times at which they get in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.admission_rule import MOST_RETRY_MS
from stream_processors.dispatcher.admission.retry_slots import FRESH_PART, GRACE_MS, RetrySlots

BACKLOG = ("pool", "acme", "normal")


def test_slots_follow_one_another_at_the_pace_of_service() -> None:
    slots = RetrySlots()
    assert [slots.refused(BACKLOG, content, 1_000, 50, 0) for content in "abc"] == [1_000, 1_050, 1_100]
    assert slots.refused(BACKLOG, "d", 5_000, 50, 0) == 5_000, "there is no room sooner"
    assert slots.refused(BACKLOG, "e", 100, 50, 0) == 5_050


def test_who_returns_at_its_slot_may_use_the_whole_target() -> None:
    slots = RetrySlots()
    assert slots.target_part(BACKLOG, "a", 0) == 1.0
    due_ms = slots.refused(BACKLOG, "a", 1_000, 50, 0)
    assert slots.target_part(BACKLOG, "a", round(due_ms) - 1) == FRESH_PART, "too early"
    assert slots.target_part(BACKLOG, "a", round(due_ms)) == 1.0
    assert slots.target_part(BACKLOG, "another", round(due_ms)) == FRESH_PART
    assert slots.target_part(("pool", "other", "normal"), "another", round(due_ms)) == 1.0, "another tenant"
    slots.admitted(BACKLOG, "a")
    assert slots.target_part(BACKLOG, "another", round(due_ms)) == 1.0, "none is outstanding"
    assert len(slots) == 0


def test_who_comes_too_early_keeps_its_slot() -> None:
    slots = RetrySlots()
    slots.refused(BACKLOG, "a", 1_000, 50, 0)
    slots.refused(BACKLOG, "b", 1_000, 50, 0)
    assert slots.refused(BACKLOG, "a", 1_000, 50, 400) == 600


def test_who_is_refused_at_its_slot_gets_another() -> None:
    slots = RetrySlots()
    slots.refused(BACKLOG, "a", 1_000, 50, 0)
    assert slots.refused(BACKLOG, "a", 300, 50, 1_000) == 300
    assert len(slots) == 1


def test_a_slot_that_nobody_used_is_forgotten() -> None:
    slots = RetrySlots()
    slots.refused(BACKLOG, "a", 1_000, 50, 0)
    assert slots.target_part(BACKLOG, "b", 1_000 + GRACE_MS) == FRESH_PART
    assert slots.target_part(BACKLOG, "b", 1_001 + GRACE_MS) == 1.0
    slots.expire(1_001 + GRACE_MS)
    assert not slots.are_outstanding(BACKLOG)


def test_beyond_the_longest_time_to_retry_there_are_none() -> None:
    slots = RetrySlots()
    assert slots.refused(BACKLOG, "a", 1_000, MOST_RETRY_MS, 0) == 1_000
    assert slots.refused(BACKLOG, "b", 1_000, 50, 0) == MOST_RETRY_MS
    assert len(slots) == 1


def test_what_is_kept_is_bounded_and_who_has_a_slot_keeps_it() -> None:
    slots = RetrySlots(max_slots=3)
    for content in range(10):
        assert slots.refused(BACKLOG, content, 1_000, 1, 0) >= 1_000
    assert len(slots) == 3
    assert [slots.target_part(BACKLOG, content, 1_010) for content in range(4)] == [1.0, 1.0, 1.0, FRESH_PART]
    slots.expire(1_003 + GRACE_MS)
    assert len(slots) == 0
    assert not slots.are_outstanding(BACKLOG)


def test_when_no_slot_is_left_they_still_do_not_return_together() -> None:
    slots = RetrySlots(max_slots=3)
    assert [slots.refused(BACKLOG, number, 1_000, 50, 0) for number in range(6)] == [1_000 + 50 * n for n in range(6)]


def test_one_backlog_leaves_slots_for_others() -> None:
    slots, other = RetrySlots(max_slots=10, max_of_backlog=4), ("pool", "other", "normal")
    for number in range(100):
        slots.refused(BACKLOG, number, 1_000, 1, 0)
    slots.refused(other, "a", 1_000, 1, 0)
    assert len(slots) == 5
    assert slots.target_part(other, "a", 1_000) == 1.0


@pytest.mark.parametrize("back_ms", [1_000, 60_000, 3_600_000])
def test_a_clock_that_is_set_back_lengthens_no_time_beyond_the_longest(back_ms: int) -> None:
    slots, now_ms = RetrySlots(), 10_000_000
    for content in "abc":
        slots.refused(BACKLOG, content, 1_000, 50, now_ms)
    for content in "abcd":
        assert slots.refused(BACKLOG, content, 1_000, 50, now_ms - back_ms) <= min(back_ms + 2_000, MOST_RETRY_MS)
    slots.expire(now_ms)
    assert len(slots) == sum(len(one.due_ms) for one in slots._backlogs.values())


def test_without_a_rate_there_is_no_slot() -> None:
    slots = RetrySlots()
    assert slots.refused(BACKLOG, "a", 1_000, float("inf"), 0) == 1_000, "that of the caller"
    assert len(slots) == 0
    assert slots.refused(BACKLOG, "b", 1_000, 50, 0) == 1_000, "nobody else waits for it"


def test_slots_that_nobody_uses_neither_lengthen_the_times_nor_take_room() -> None:
    """A flash crowd of a hundred times what can be served, which does not come back."""
    slots = RetrySlots()
    told = [slots.refused(BACKLOG, content, 1_000, 100, 0) for content in range(1_000)]
    assert told[-1] == 1_000 + 999 * 100
    assert slots.target_part(BACKLOG, "new", 1_000) == FRESH_PART
    now_ms = 1_000 + GRACE_MS + 4_000
    assert slots.target_part(BACKLOG, "new", now_ms) > 0.9
    assert slots.refused(BACKLOG, "new", 1_000, 100, now_ms) < 15_000


def test_an_open_loop_is_never_told_the_longest_time_to_retry() -> None:
    """Three times what can be served, for ten minutes, and nobody comes back."""
    slots = RetrySlots()
    told = [slots.refused(BACKLOG, number, 1_000, 100, 50 * number) for number in range(12_000)]
    assert max(told) < 20_000
    assert len(slots) < 1_000


def test_what_was_used_leaves_nothing_behind() -> None:
    slots = RetrySlots()
    for number in range(10_000):
        due_ms = slots.refused(BACKLOG, number, 100, 50, 50 * number)
        slots.target_part(BACKLOG, number, 50 * number + round(due_ms))
        slots.admitted(BACKLOG, number)
    assert len(slots) == 0
    assert len(slots._backlogs[BACKLOG].by_time) < 200


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3_000), st.integers(1, 2_000)), min_size=1, max_size=60),
)
def test_slots_are_never_closer_than_service(steps: list[tuple[int, int, int]]) -> None:
    """Who comes only at the times that it was told is one of at most one for each service time, if all do."""
    slots, now_ms = RetrySlots(), 0
    due: list[tuple[float, int]] = []
    for content, passed_ms, service_ms in steps:
        now_ms += passed_ms
        for number, (due_ms, _) in enumerate(due):
            if due_ms <= now_ms:
                slots.admitted(BACKLOG, (steps[number][0], number))
        wait_ms = slots.refused(BACKLOG, (content, len(due)), 100, service_ms, now_ms)
        assert 100 <= wait_ms <= MOST_RETRY_MS
        due.append((now_ms + wait_ms, service_ms))
    for (one_ms, service_ms), (other_ms, _) in pairwise(due):
        assert other_ms >= one_ms + service_ms or other_ms >= one_ms + MOST_RETRY_MS / 2


@pytest.mark.parametrize("users", [20, 60])
def test_a_closed_loop_of_obedient_senders_gets_in_at_the_second_try(users: int) -> None:
    """Each sends one request, waits for its answer or obeys the time to retry, and begins again: far more than can be
    served. The queue serves one in 100 ms, and its target is 1 s."""
    slots, queue_until_ms, tries = RetrySlots(), 0.0, [1] * users
    needed: list[int] = []
    due: list[tuple[float, int, int]] = [(float(user), user, 0) for user in range(users)]
    while len(needed) < 1_000:
        due.sort()
        at, user, turn = due.pop(0)
        now_ms = round(at + 0.5)
        wait_ms = max(0.0, queue_until_ms - now_ms)
        if wait_ms <= 1_000 * slots.target_part(BACKLOG, (user, turn), now_ms):
            slots.admitted(BACKLOG, (user, turn))
            queue_until_ms = now_ms + wait_ms + 100
            needed.append(tries[user])
            tries[user] = 1
            due.append((queue_until_ms, user, turn + 1))
        else:
            tries[user] += 1
            due.append((now_ms + slots.refused(BACKLOG, (user, turn), 100, 100, now_ms), user, turn))
    later = needed[100:]
    assert sum(count <= 2 for count in later) / len(later) >= 0.95
