"""What a rollout does next: stay, advance, promote or roll back. Pure.

In a step of ``p`` percent, the candidate gets ``p`` percent of the traffic and a control of the champion as much; so a
judged step has 50 percent at most. The last step is 100 percent: it has no control, and to reach it is to be promoted.
"""

from enum import StrEnum

from fairlane.rollout_records import Rollout
from fairlane_server.models.rollout_arms import RolloutStatus
from fairlane_server.rollouts.verdict import RolloutVerdict


class StepApproval(StrEnum):
    """What a person said about the present step."""

    WHEN_PASSED = "when_passed"
    """It may end once it is passed."""
    AT_ONCE = "at_once"
    """It ends without evidence; not against the verdict that the candidate is worse."""


class StepAction(StrEnum):
    """What is to be done."""

    STAY = "stay"
    ADVANCE = "advance"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


def next_action(rollout: Rollout, verdict: RolloutVerdict, now_ms: int) -> tuple[StepAction, str]:
    """What to do with a rollout that is under way, and why."""
    if verdict is RolloutVerdict.WORSE:
        return StepAction.ROLL_BACK, "the candidate is worse"
    if rollout.status == RolloutStatus.PAUSED:
        return StepAction.STAY, "paused"
    if rollout.approval != StepApproval.AT_ONCE:
        if verdict is RolloutVerdict.UNDECIDED:
            return StepAction.STAY, "not enough evidence"
        if now_ms - rollout.step_started_at_ms < rollout.least_step_ms:
            return StepAction.STAY, f"the step lasts at least {rollout.least_step_ms} ms"
        if rollout.needs_approval and rollout.approval is None:
            return StepAction.STAY, "waits for approval"
    reason = "approved without evidence" if rollout.approval == StepApproval.AT_ONCE else "passed"
    is_last = rollout.step + 2 >= len(rollout.steps)
    return (StepAction.PROMOTE if is_last else StepAction.ADVANCE), reason
