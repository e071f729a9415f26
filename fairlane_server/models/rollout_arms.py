"""The arms of a rollout: which part of a model's requests goes to the candidate and to its control. Pure."""

from enum import StrEnum

from fairlane.records import RouteArm, RouteRule
from fairlane.rollout_records import Rollout
from fairlane_server.models.routes import CHAMPION

CANDIDATE_ARM = "rollout-candidate"
CONTROL_ARM = "rollout-control"
"""A slice of the champion as large as the candidate's, at the same time: the two are compared."""
RESERVED = frozenset({CANDIDATE_ARM, CONTROL_ARM})
"""No arm of a rule and no alias has these names."""

MOST_COMPARED_PERCENT = 50
"""Beyond it no slice of the champion is as large."""


class RolloutStatus(StrEnum):
    """State of a rollout. The last three are final."""

    RUNNING = "running"
    PAUSED = "paused"
    """It stays at its step. A candidate that is worse is rolled back all the same."""
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"


ACTIVE = frozenset({RolloutStatus.RUNNING, RolloutStatus.PAUSED})
"""States in which the candidate gets requests."""


def is_active(rollout: Rollout) -> bool:
    """Whether it divides requests."""
    return rollout.status in ACTIVE


def rollout_rule(rollout: Rollout) -> RouteRule:
    """The rule by which an active rollout divides the requests that meet no other rule. What is not compared goes to
    the champion."""
    percent = rollout.steps[rollout.step]
    arms = [
        RouteArm(CANDIDATE_ARM, rollout.candidate, percent),
        RouteArm(CONTROL_ARM, rollout.champion, percent),
        RouteArm(CHAMPION, f"@{CHAMPION}", 100 - 2 * percent),
    ]
    # The name is the salt of the hash: the same in all steps, so that nobody leaves the candidate when its part grows,
    # and another one for each rollout, so that not the same callers always come first.
    return RouteRule(rollout.rollout, tuple(arms), sticky_by=rollout.sticky_by)
