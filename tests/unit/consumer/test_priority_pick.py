"""Whose turn it is: shares by weight, a bounded wait, and nothing gained by going away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS, PriorityPick
from tests.kit.micro_batch_kit import longest_wait

PRIORITIES = tuple(PRIORITY_WEIGHTS)


def turn(pick: PriorityPick, present: set[str]) -> str:
    priority = pick.next(present)
    pick.took(priority)
    return priority


@given(present=st.sets(st.sampled_from(PRIORITIES), min_size=1), rounds=st.integers(1, 200))
def test_turns_are_shared_by_weight(present: set[str], rounds: int) -> None:
    """While all of them have something, each has its share of the turns, to one turn."""
    pick = PriorityPick()
    had = [turn(pick, present) for _ in range(rounds)]
    total = sum(PRIORITY_WEIGHTS[priority] for priority in present)
    for priority in present:
        assert abs(had.count(priority) - rounds * PRIORITY_WEIGHTS[priority] / total) <= 1
    assert had[0] == next(priority for priority in PRIORITIES if priority in present)


def test_the_bounds_that_are_promised() -> None:
    assert longest_wait("low", others_jump=False) == 13
    assert longest_wait("low") == 15
    assert longest_wait("low", has_jumped=True) == 26


@given(
    chosen=st.sampled_from(PRIORITIES),
    steps=st.lists(st.tuples(st.sets(st.sampled_from(PRIORITIES)), st.sampled_from((None, *PRIORITIES))), max_size=150),
    flood=st.sets(st.sampled_from(PRIORITIES)),
)
def test_a_wait_is_bounded_whoever_comes_goes_and_jumps(
    chosen: str, steps: list[tuple[set[str], str | None]], flood: set[str]
) -> None:
    """After any past, ``chosen`` is always there. The others come and go, and jump whenever they may."""
    pick, waited, has_jumped, others_jump = PriorityPick(), 0, False, False
    flooded: list[tuple[set[str], str | None]] = [(flood, jumper) for jumper in (None, *PRIORITIES) * 12]
    for present, jumper in [*steps, *flooded]:
        jumps = jumper is not None and jumper in (present | {chosen}) and pick.may_jump(jumper)
        if jumper is not None and jumps:
            pick.jumped(jumper)
            had = jumper
        else:
            had = turn(pick, present | {chosen})
        others_jump |= jumps and had != chosen
        if had == chosen:
            waited, has_jumped = 0, jumps
        else:
            waited += 1
        assert waited <= longest_wait(chosen, has_jumped=has_jumped, others_jump=others_jump)


def test_the_bound_is_nearly_reached() -> None:
    """A bound far from what happens would prove nothing."""
    pick, waits = PriorityPick(), [0]
    assert turn(pick, {"low"}) == "low"
    for _ in range(200):
        if turn(pick, set(PRIORITIES)) == "low":
            waits.append(0)
        else:
            waits[-1] += 1
    assert longest_wait("low", others_jump=False) - 2 <= max(waits) <= longest_wait("low", others_jump=False)


def test_who_was_away_saved_nothing_up() -> None:
    pick = PriorityPick()
    for _ in range(300):
        turn(pick, {"normal"})
    assert [turn(pick, {"normal", "low"}) for _ in range(8)].count("low") == 2


def test_going_away_pays_off_no_debt() -> None:
    pick = PriorityPick()
    assert turn(pick, {"low", "high"}) == "high"
    assert turn(pick, {"low", "high"}) == "low"
    for _ in range(3):
        assert turn(pick, {"high"}) == "high"
    assert turn(pick, {"low", "high"}) == "high", "low has had its turn, and was not away for long enough for another"


def test_a_jump_is_paid_for_and_needs_a_turn_between() -> None:
    pick = PriorityPick()
    assert pick.may_jump("low")
    pick.jumped("low")
    assert not pick.may_jump("low")
    had = [turn(pick, {"low", "high"}) for _ in range(9)]
    assert had.count("low") <= 1, "one in nine is its share, with the jump two in ten"
    while turn(pick, {"low", "high"}) != "low":
        pass
    assert pick.may_jump("low")


@pytest.mark.parametrize("count", [600])
def test_jumping_all_the_time_gains_no_share(count: int) -> None:
    """Low jumps whenever it may; in the long run it still has its share of the turns."""
    pick, had = PriorityPick(), {"high": 0, "low": 0}
    for _ in range(count):
        if pick.may_jump("low"):
            pick.jumped("low")
            had["low"] += 1
        else:
            had[turn(pick, {"high", "low"})] += 1
    assert had["low"] == pytest.approx(count / 9, abs=2)


def test_of_those_who_come_back_together_the_higher_goes_first() -> None:
    """Whoever of them had less before they were away."""
    pick = PriorityPick()
    for _ in range(10):
        turn(pick, {"high"})
    for _ in range(50):
        turn(pick, {"normal"})
    assert [turn(pick, {"high", "low"}) for _ in range(2)] == ["high", "low"]
