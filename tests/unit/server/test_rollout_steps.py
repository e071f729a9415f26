"""What a rollout does next, for every combination of state and verdict."""

from dataclasses import replace
from itertools import product

import pytest

from fairlane_server.models.rollout_arms import RolloutStatus
from fairlane_server.rollouts.changes import RolloutPlan, first_step
from fairlane_server.rollouts.steps import StepAction, StepApproval, next_action
from fairlane_server.rollouts.verdict import RolloutVerdict

LEAST_MS = 1_000
EARLY, LATE = LEAST_MS - 1, LEAST_MS
APPROVALS = (None, *StepApproval)
STATES = list(product(range(4), (EARLY, LATE), RolloutVerdict, APPROVALS, (False, True), (False, True)))


@pytest.mark.parametrize("needs_approval", [False, True])
def test_every_state_has_the_action_of_the_rules(needs_approval: bool) -> None:
    plan = RolloutPlan("2", least_step_ms=LEAST_MS, needs_approval=needs_approval)
    for step, now_ms, verdict, approval, is_paused, is_later in STATES:
        began = 5_000 if is_later else 0
        status = RolloutStatus.PAUSED if is_paused else RolloutStatus.RUNNING
        rollout = replace(
            first_step(plan, "1", 0), step=step, step_started_at_ms=began, approval=approval, status=status
        )
        action, reason = next_action(rollout, verdict, began + now_ms)

        ends = verdict is RolloutVerdict.PASSED and now_ms == LATE and (approval is not None or not needs_approval)
        if verdict is RolloutVerdict.WORSE:
            expected = StepAction.ROLL_BACK
        elif is_paused or not (ends or approval is StepApproval.AT_ONCE):
            expected = StepAction.STAY
        else:
            expected = StepAction.PROMOTE if step == 3 else StepAction.ADVANCE
        assert (action, bool(reason)) == (expected, True), (rollout, verdict, now_ms)


def test_nothing_rolls_back_for_want_of_evidence() -> None:
    rollout = first_step(RolloutPlan("2"), "1", 0)

    for now_ms in (0, 10**6, 10**12):
        assert next_action(rollout, RolloutVerdict.UNDECIDED, now_ms)[0] is StepAction.STAY
