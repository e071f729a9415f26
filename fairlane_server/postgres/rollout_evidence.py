"""Evidence about the arms of a rollout, from the tables that the recorder fills."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fairlane.names import backfill_topic
from fairlane.outcomes import Code, Outcome
from fairlane.rollout_records import Rollout
from fairlane_server.models.rollout_arms import CANDIDATE_ARM, CONTROL_ARM
from fairlane_server.models.routes import version_key
from fairlane_server.rollouts.evidence import LATENCY_BOUNDS_MS, OVERDUE_BUCKET, ArmEvidence, Moments

if TYPE_CHECKING:
    import psycopg

REFUSALS_THAT_COUNT = (
    *(Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.UNKNOWN_MODEL, Code.FORBIDDEN, Code.INVALID),
    Code.CONTEXT_TOO_LONG,
)
"""A version that refuses what the other one answers is worse. Quotas, budgets and checks of the input concern both."""

_LONGEST_FLIGHT_MS = 900_000
"""How long ago what has no answer is looked for: an anti-join of a whole step would take too long."""

# A cached answer is not the version's work, and what was cancelled says nothing of it. Durations are of one clock each:
# of the dispatcher until the request left it, of the consumer from there on; the ways between them are left out.
_ANSWERED = """
SELECT arm, outcome, currency, starts_with(source_topic, %(backfill)s) AS is_backfill, width_bucket(
        coalesce(
            dispatched_at_ms - admitted_at_ms + engine_finished_at_ms - received_at_ms,
            replied_at_ms - coalesce(admitted_at_ms, submitted_at_ms)
        ),
        %(bounds)s::double precision[]
    ) AS bucket, count(*), count(cost_nanos), sum(cost_nanos), sum(cost_nanos::double precision ^ 2)
FROM results
WHERE model = %(model)s AND arm IN ('rollout-candidate', 'rollout-control') AND cache_use IS NULL
    AND coalesce(admitted_at_ms, submitted_at_ms) >= %(since_ms)s AND replies_seen > 0
    AND coalesce(model_version, CASE arm WHEN 'rollout-candidate' THEN %(candidate)s ELSE %(champion)s END)
        = CASE arm WHEN 'rollout-candidate' THEN %(candidate)s ELSE %(champion)s END
    AND (outcome = ANY(%(outcomes)s) OR outcome = %(rejected)s AND code = ANY(%(refusals)s))
GROUP BY arm, outcome, currency, is_backfill, bucket
"""
_UNANSWERED = """
SELECT inputs ->> 'arm' AS arm, (inputs ->> 'deadline_at_ms')::bigint < %(now_ms)s AS is_overdue,
    count(DISTINCT (tenant, request_id))
FROM audit_logs AS admitted
WHERE inputs ->> 'arm' IN ('rollout-candidate', 'rollout-control') AND inputs ->> 'version' = ANY(%(versions)s)
    AND occurred_at_ms >= greatest(%(since_ms)s, %(flight_ms)s) AND NOT starts_with(source_topic, %(backfill)s)
    AND NOT EXISTS (
        SELECT FROM results WHERE results.request_id = admitted.request_id AND results.tenant = admitted.tenant
    )
GROUP BY 1, 2
"""
_KEYS = """
SELECT arm, sum(requests), sum(requests * requests) FROM (
    SELECT inputs ->> 'arm' AS arm, count(*) AS requests FROM audit_logs
    WHERE inputs ->> 'arm' IN ('rollout-candidate', 'rollout-control') AND inputs ->> 'version' = ANY(%(versions)s)
        AND occurred_at_ms >= %(since_ms)s
    GROUP BY 1, inputs ->> 'sticky_key'
) AS keys GROUP BY arm
"""
# One rating of a request: the mean of those of several people.
_RATINGS = """
SELECT arm, count(*), sum(rating), sum(rating * rating) FROM (
    SELECT tenant, request_id, arm, avg(rating) AS rating FROM feedback
    WHERE model = %(model)s AND rating IS NOT NULL AND given_at_ms >= %(since_ms)s
        AND (arm, model_version) IN (('rollout-candidate', %(candidate)s), ('rollout-control', %(champion)s))
    GROUP BY 1, 2, 3
) AS rated
WHERE EXISTS (
    SELECT FROM results WHERE results.request_id = rated.request_id AND results.tenant = rated.tenant
        AND results.arm = rated.arm AND results.admitted_at_ms >= %(since_ms)s
)
GROUP BY arm
"""


@dataclass(slots=True)
class _Arm:
    evidence: ArmEvidence = ArmEvidence()  # noqa: RUF009 - frozen
    costs: dict[str | None, Moments] = field(default_factory=lambda: defaultdict(Moments))
    """By currency."""


def read_rollout_evidence(
    connection: "psycopg.Connection", model: str, rollout: Rollout, now_ms: int
) -> tuple[ArmEvidence, ArmEvidence]:
    """Evidence of the candidate and of the control, from requests admitted since the present step began, and from what
    was said of their answers. Raises psycopg.Error."""
    values = {
        "model": model,
        "candidate": rollout.candidate,
        "champion": rollout.champion,
        "versions": [version_key(model, version) for version in (rollout.candidate, rollout.champion)],
        "since_ms": rollout.step_started_at_ms,
        "now_ms": now_ms,
        "flight_ms": now_ms - _LONGEST_FLIGHT_MS,
        "bounds": list(LATENCY_BOUNDS_MS),
        "outcomes": [Outcome.OK, Outcome.FAILED, Outcome.EXPIRED],
        "rejected": Outcome.REJECTED,
        "refusals": [*REFUSALS_THAT_COUNT],
        "backfill": backfill_topic(""),
    }
    arms = {CANDIDATE_ARM: _Arm(), CONTROL_ARM: _Arm()}
    for arm, *counted in connection.execute(_ANSWERED, values):
        _add_answers(arms[arm], *counted)
    for arm, is_overdue, count in connection.execute(_UNANSWERED, values):
        arms[arm].evidence += _unanswered(count, is_overdue=is_overdue)
    for arm, count, total, squares in connection.execute(_RATINGS, values):
        arms[arm].evidence += ArmEvidence(quality=Moments(count, total, squares))
    for arm, requests, squared in connection.execute(_KEYS, values):
        arms[arm].evidence = _with_keys(arms[arm].evidence, float(squared) / float(requests))
    currencies = {currency for one in arms.values() for currency in one.costs}
    if len(currencies) == 1:
        (currency,) = currencies
        for one in arms.values():
            one.evidence = replace(one.evidence, cost=one.costs[currency])
    return arms[CANDIDATE_ARM].evidence, arms[CONTROL_ARM].evidence


def _add_answers(
    arm: _Arm,
    outcome: str,
    currency: str | None,
    is_backfill: bool,
    bucket: int,
    count: int,
    priced: int,
    cost: Any,
    squared_cost: float | None,
) -> None:
    """Add some answers of one outcome. What fails fast says nothing of speed, what expires was as slow as can be, and
    work of jobs waits for its turn."""
    is_ok = outcome == Outcome.OK
    slow = {OVERDUE_BUCKET: count} if outcome == Outcome.EXPIRED else {}
    latencies = {} if is_backfill else {bucket: count} if is_ok else slow
    arm.evidence += ArmEvidence(requests=count, failed=0 if is_ok else count, latencies=latencies)
    if is_ok and priced:
        arm.costs[currency] += Moments(priced, float(cost), squared_cost or 0.0)


def _unanswered(count: int, *, is_overdue: bool) -> ArmEvidence:
    """Evidence of requests without a reply: behind their deadlines they have failed."""
    if is_overdue:
        return ArmEvidence(requests=count, failed=count, latencies={OVERDUE_BUCKET: count})
    return ArmEvidence(requests=count, in_flight=count)


def _with_keys(evidence: ArmEvidence, requests_per_key: float) -> ArmEvidence:
    """With the mean number of requests that share a request's sticky key. It is known of the requests admitted, which
    are a few more than those that count."""
    squared = round(evidence.requests * requests_per_key)
    return replace(
        evidence, squared_requests_of_keys=min(max(squared, evidence.requests), evidence.requests * evidence.requests)
    )
