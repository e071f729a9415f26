"""What a rollout does next, for every combination of state and verdict."""

from collections.abc import Sequence
from itertools import product

import pytest

from fairlane_server.rollouts.steps import StepAction, StepApproval, StepPlan, StepState, next_action
from fairlane_server.rollouts.verdict import RolloutVerdict

LEAST_MS = 1_000
EARLY, LATE = LEAST_MS - 1, LEAST_MS
APPROVALS = (None, *StepApproval)
STATES = list(product(range(4), (EARLY, LATE), RolloutVerdict, APPROVALS, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize("needs_approval", [False, True])
def test_every_state_has_the_action_of_the_rules(needs_approval: bool) -> None:
    plan = StepPlan(least_step_ms=LEAST_MS, needs_approval=needs_approval)
    for step, now_ms, verdict, approval, is_paused, is_aborted, is_later in STATES:
        began = 5_000 if is_later else 0
        state = StepState(step, began, approval, is_paused, is_aborted)
        action, reason = next_action(plan, state, verdict, began + now_ms)

        ends = verdict is RolloutVerdict.PASSED and now_ms == LATE and (approval is not None or not needs_approval)
        if is_aborted or verdict is RolloutVerdict.WORSE:
            expected = StepAction.ROLL_BACK
        elif is_paused or not (ends or approval is StepApproval.AT_ONCE):
            expected = StepAction.STAY
        else:
            expected = StepAction.PROMOTE if step == 3 else StepAction.ADVANCE
        assert (action, bool(reason)) == (expected, True), (state, verdict, now_ms)


def test_nothing_rolls_back_for_want_of_evidence() -> None:
    plan, state = StepPlan(), StepState(0, 0)

    for now_ms in (0, 10**6, 10**12):
        assert next_action(plan, state, RolloutVerdict.UNDECIDED, now_ms)[0] is StepAction.STAY


@pytest.mark.parametrize("step", [-1, 4])
def test_the_last_step_is_not_judged(step: int) -> None:
    with pytest.raises(ValueError, match=r"^step: "):
        next_action(StepPlan(), StepState(step, 0), RolloutVerdict.PASSED, 0)


def test_the_steps_of_a_plan_but_the_last_are_judged() -> None:
    assert StepPlan().judged_steps == 4
    assert StepPlan((50, 100)).judged_steps == 1


@pytest.mark.parametrize(
    "percents", [(), (100,), (1, 5), (5, 1, 100), (5, 5, 100), (0, 100), (60, 100), (-1, 100), (float("nan"), 100)]
)
def test_impossible_steps_are_refused(percents: Sequence[float]) -> None:
    with pytest.raises(ValueError, match=r"^percents: "):
        StepPlan(percents)


def test_other_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^percents: "):
        StepPlan((*(number / 10 for number in range(1, 40)), 100.0))
    with pytest.raises(ValueError, match=r"^least_step_ms: "):
        StepPlan(least_step_ms=-1)
