"""What a rollout does next: stay, advance, promote or roll back. Pure.

In a step of ``p`` percent, the candidate gets ``p`` percent of the traffic and a control of the champion as much; so a
judged step has 50 percent at most. The last step is 100 percent: it has no control, and to reach it is to be promoted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from fairlane_server.rollouts.verdict import RolloutVerdict

MOST_JUDGED_PERCENT = 50.0
MOST_STEPS = 32


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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Steps of a rollout. Raises ValueError with the field and the reason.

    Attributes:
        percents: of the traffic, rising, the last 100.
        least_step_ms: a step lasts at least this long, however clear its verdict, unless it is worse.
        needs_approval: whether a person must approve the end of each step.
    """

    percents: Sequence[float] = (1.0, 5.0, 25.0, 50.0, 100.0)
    least_step_ms: int = 60_000
    needs_approval: bool = False

    def __post_init__(self) -> None:
        *judged, last = self.percents or (0.0,)
        if not judged or len(self.percents) > MOST_STEPS or last != 100.0:
            raise ValueError(f"percents: must be 2 to {MOST_STEPS}, the last 100")
        if any(not 0.0 < percent <= MOST_JUDGED_PERCENT for percent in judged):
            raise ValueError(f"percents: all but the last must be above 0, and at most {MOST_JUDGED_PERCENT:g}")
        if any(later <= earlier for earlier, later in pairwise(judged)):
            raise ValueError("percents: must rise")
        if self.least_step_ms < 0:
            raise ValueError(f"least_step_ms: {self.least_step_ms} is less than 0")

    @property
    def judged_steps(self) -> int:
        """Steps with a control."""
        return len(self.percents) - 1


@dataclass(frozen=True, slots=True)
class StepState:
    """Where a rollout is.

    Attributes:
        step: place in the plan, from 0; one of its judged steps.
        began_at_ms: when the step did.
        is_paused: it does not advance. It still rolls back.
        is_aborted: a person wants it rolled back.
    """

    step: int
    began_at_ms: int
    approval: StepApproval | None = None
    is_paused: bool = False
    is_aborted: bool = False


def next_action(plan: StepPlan, state: StepState, verdict: RolloutVerdict, now_ms: int) -> tuple[StepAction, str]:
    """What to do, and why. Raises ValueError for a step that is not judged."""
    if not 0 <= state.step < plan.judged_steps:
        raise ValueError(f"step: {state.step} is not from 0 to {plan.judged_steps - 1}")
    if state.is_aborted:
        return StepAction.ROLL_BACK, "aborted"
    if verdict is RolloutVerdict.WORSE:
        return StepAction.ROLL_BACK, "the candidate is worse"
    if state.is_paused:
        return StepAction.STAY, "paused"
    if state.approval is not StepApproval.AT_ONCE:
        if verdict is RolloutVerdict.UNDECIDED:
            return StepAction.STAY, "not enough evidence"
        if now_ms - state.began_at_ms < plan.least_step_ms:
            return StepAction.STAY, f"the step lasts at least {plan.least_step_ms} ms"
        if plan.needs_approval and state.approval is None:
            return StepAction.STAY, "waits for approval"
    reason = "approved without evidence" if state.approval is StepApproval.AT_ONCE else "passed"
    is_last = state.step == plan.judged_steps - 1
    return (StepAction.PROMOTE if is_last else StepAction.ADVANCE), reason
