"""Rollouts on the wire: the plan of one, its state, and what its guards found."""

from fairlane.frozen import frozen_dataclass


@frozen_dataclass(frozen=True, slots=True)
class RolloutGuards:
    """Tolerated harm of a candidate, and rates of wrong verdicts. A tolerance of None turns its guard off.

    Attributes:
        most_added_failures: part of the requests that may fail on the candidate beyond those of the control.
        most_latency_ratio: bound of the candidate's latency quantile, divided by the control's.
        latency_quantile: which one.
        most_cost_ratio: bound of the candidate's mean cost, divided by the control's.
        most_lost_quality: by how much the mean score may be lower.
        false_rollback_rate: at most this part of the rollouts of candidates that are no worse in anything ends in a
            rollback. It is divided evenly between the judged steps and the guards.
        false_pass_rate: at most this part of the candidates that are worse than a tolerance in a step passes it. It is
            not divided: to pass a step, a candidate must pass every guard, and to be promoted, every step.
        least_requests: answered by each arm before a step is passed.
        least_values: costs, or scores, of each arm before they count as data.
        require_quality: whether a step waits for scores. Without it, a step with too few scores passes without.
        most_control_failures: no step is passed while more than this part of the control's requests fail.
        key_correlation: assumed between requests of one sticky key.
    """

    most_added_failures: float = 0.01
    most_latency_ratio: float | None = 1.2
    latency_quantile: float = 0.95
    most_cost_ratio: float | None = 1.1
    most_lost_quality: float | None = 0.02
    false_rollback_rate: float = 0.01
    false_pass_rate: float = 0.05
    least_requests: int = 100
    least_values: int = 50
    require_quality: bool = False
    most_control_failures: float = 0.2
    key_correlation: float = 0.1


@frozen_dataclass(frozen=True, slots=True)
class GuardFinding:
    """Finding of one guard.

    Harms of errors and quality are differences, those of latency and cost ratios less 1. Above 0 it is worse.

    Attributes:
        guard: errors, latency, cost or quality.
        verdict: pass, worse or undecided; None if there are no data, and none are required.
        candidate: what was measured: part of the requests that failed, quantile in ms, mean nano-USD, mean score; None
            without data, and for a quantile among the overdue requests.
        control: the same of the control.
        harm: None if it is unknown or infinite; so are its bounds.
        lower: the harm is greater, but for the rate of false rollbacks.
        upper: the harm is smaller, but for the rate of false passes.
        tolerance: of the harm.
    """

    guard: str
    verdict: str | None
    candidate: float | None
    control: float | None
    harm: float | None
    lower: float | None
    upper: float | None
    tolerance: float


@frozen_dataclass(frozen=True, slots=True)
class Rollout:
    """The latest rollout of a model: a candidate that gets its requests in steps, beside an equal slice of the champion
    that it is compared with.

    ``steps`` are percentages of the requests that meet no rule; the last is 100, with which the candidate becomes the
    champion. ``step`` is the index of the present one. ``approval`` is when_passed or at_once once a person has said
    so of this step. ``status`` is running, paused, promoted, rolled_back or aborted; ``decided`` is what the latest
    change of the rollout did, and ``findings``, of so many requests of the two arms, why.
    """

    rollout: str
    candidate: str
    champion: str
    steps: tuple[float, ...]
    guards: RolloutGuards
    least_step_ms: int
    sticky_by: str
    needs_approval: bool
    status: str
    step: int
    started_at_ms: int
    step_started_at_ms: int
    approval: str | None = None
    decided: str = "started"
    candidate_requests: int = 0
    control_requests: int = 0
    findings: tuple[GuardFinding, ...] = ()
