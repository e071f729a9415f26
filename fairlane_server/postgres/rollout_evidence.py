"""Evidence about the arms of a rollout, from the tables that the recorder fills."""

from typing import TYPE_CHECKING, Any

from fairlane.outcomes import Code, Outcome
from fairlane.rollout_records import Rollout
from fairlane_server.models.rollout_arms import CANDIDATE_ARM, CONTROL_ARM
from fairlane_server.models.routes import version_key
from fairlane_server.postgres.feedback_scores import read_feedback_scores
from fairlane_server.rollouts.evidence import LATENCY_BOUNDS_MS, OVERDUE_BUCKET, ArmEvidence, Moments

if TYPE_CHECKING:
    import psycopg

_LONGEST_FLIGHT_MS = 900_000
"""What was admitted before and has no answer is work of a job, which waits for as long as it takes."""

# A cached answer is not the version's work. What was cancelled, or refused by a check of the input, says nothing of
# it, nor does a prompt that is too long for any version.
_ANSWERED = """
SELECT arm, outcome, width_bucket(replied_at_ms - admitted_at_ms, %(bounds)s::double precision[]) AS bucket,
    count(*), count(cost_nanos), sum(cost_nanos), sum(cost_nanos::double precision ^ 2)
FROM results
WHERE model = %(model)s AND arm IN ('rollout-candidate', 'rollout-control') AND admitted_at_ms >= %(since_ms)s
    AND replies_seen > 0 AND cache_use IS NULL AND outcome = ANY(%(outcomes)s)
    AND code IS DISTINCT FROM %(too_long)s
GROUP BY arm, outcome, bucket
"""
_ADMITTED = """
SELECT inputs ->> 'arm' AS arm, count(*)
FROM audit_logs AS admitted
WHERE inputs ->> 'arm' IN ('rollout-candidate', 'rollout-control') AND inputs ->> 'version' = ANY(%(versions)s)
    AND occurred_at_ms >= greatest(%(since_ms)s, %(flight_ms)s) AND NOT EXISTS (
        SELECT FROM results WHERE results.request_id = admitted.request_id AND results.tenant = admitted.tenant
    )
GROUP BY 1
"""


def read_rollout_evidence(
    connection: "psycopg.Connection", model: str, rollout: Rollout, now_ms: int
) -> tuple[ArmEvidence, ArmEvidence]:
    """Evidence of the candidate and of the control, from requests admitted and ratings given since the present step
    began. Raises psycopg.Error."""
    values = {
        "model": model,
        "since_ms": rollout.step_started_at_ms,
        "bounds": list(LATENCY_BOUNDS_MS),
        "outcomes": [Outcome.OK, Outcome.FAILED, Outcome.EXPIRED],
        "too_long": Code.CONTEXT_TOO_LONG,
        "flight_ms": now_ms - _LONGEST_FLIGHT_MS,
        "versions": [version_key(model, version) for version in (rollout.candidate, rollout.champion)],
    }
    arms = {CANDIDATE_ARM: ArmEvidence(), CONTROL_ARM: ArmEvidence()}
    for row in connection.execute(_ANSWERED, values):
        arms[row[0]] += _answered(*row[1:])
    for arm, in_flight in connection.execute(_ADMITTED, values):
        arms[arm] += ArmEvidence(requests=in_flight, in_flight=in_flight)
    for scores in read_feedback_scores(connection, rollout.step_started_at_ms, model, tuple(arms)):
        arms[scores.arm] += ArmEvidence(quality=Moments(scores.count, scores.total, scores.squares))
    return arms[CANDIDATE_ARM], arms[CONTROL_ARM]


def _answered(outcome: str, bucket: int, count: int, priced: int, cost: Any, squared_cost: float | None) -> ArmEvidence:
    """Evidence of some answers of one outcome. Those that fail fast say nothing of speed; those that expire were as
    slow as can be."""
    is_ok = outcome == Outcome.OK
    latencies = {bucket: count} if is_ok else {OVERDUE_BUCKET: count} if outcome == Outcome.EXPIRED else {}
    return ArmEvidence(
        requests=count,
        failed=0 if is_ok else count,
        latencies=latencies,
        cost=Moments(priced, float(cost or 0), squared_cost or 0.0) if is_ok else Moments(),
    )
