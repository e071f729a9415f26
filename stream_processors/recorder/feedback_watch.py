"""The thread that shows satisfaction by model, and adds the model version to feedback that the recorder missed."""

from collections.abc import Callable

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.postgres.feedback_scores import ScoreSums, read_feedback_scores
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-feedback-watch"
SHOWN_MS = 86_400_000
"""The ratings of so long are shown."""

_MOST_SHOWN = 200
_MOST_AT_ONCE = 1_000
_INTERVAL_S = 60.0
_CALL_TIMEOUT_S = 10.0

# Two recorders that store a result and its feedback at once do not see each other's rows: the later of the two was
# recorded some seconds ago when it is found. Feedback without a result counts for nobody's bound.
_MISSED = """
SELECT DISTINCT feedback.tenant, feedback.request_id
FROM feedback JOIN results ON results.tenant = feedback.tenant AND results.request_id = feedback.request_id
WHERE feedback.model IS NULL AND feedback.recorded_at > now() - interval '10 minutes'
    AND results.model IS NOT NULL AND results.model_version IS NOT NULL
LIMIT %s
"""
# What was said about a request that the tenant never had, or that got no answer, is of no use to anybody. Locked rows
# are left for the next look: others lock rows in another order, so waiting could deadlock.
_REMOVE_UNANSWERED = """
DELETE FROM feedback WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM feedback WHERE model IS NULL AND recorded_at < now() - interval '1 day'
    LIMIT %s FOR UPDATE SKIP LOCKED
))
"""
# An id that was sent again may have more results: the run counts before the refusal, then the last. Rows are locked in
# the order in which the recorder writes them.
_ADD_VERSIONS = b"""
WITH given AS (
    SELECT feedback.tenant, feedback.request_id, feedback.given_by
    FROM unnest(%s::text[], %s::text[]) AS about (tenant, request_id)
    JOIN feedback ON feedback.tenant = about.tenant AND feedback.request_id = about.request_id
    WHERE feedback.model IS NULL
    ORDER BY feedback.tenant, feedback.request_id, feedback.given_by FOR UPDATE OF feedback
), answer AS (
    SELECT DISTINCT ON (results.tenant, results.request_id) results.tenant, results.request_id, results.model,
        results.model_version, results.arm
    FROM (SELECT DISTINCT tenant, request_id FROM given) AS about
    JOIN results ON results.tenant = about.tenant AND results.request_id = about.request_id
    WHERE results.model IS NOT NULL AND results.model_version IS NOT NULL
    ORDER BY results.tenant, results.request_id, results.outcome <> 'ok', results.replied_at_ms DESC
)
UPDATE feedback SET model = answer.model, model_version = answer.model_version, arm = answer.arm,
    conversation_id = (
        SELECT conversation_id FROM conversation_turns AS turn
        WHERE turn.tenant = answer.tenant AND turn.request_id = answer.request_id LIMIT 1
    )
FROM given JOIN answer USING (tenant, request_id)
WHERE feedback.tenant = answer.tenant AND feedback.request_id = answer.request_id
    AND feedback.given_by = given.given_by
"""


def add_model_versions(connection: psycopg.Connection, tenants: list[str], request_ids: list[str]) -> int:
    """Add model, version, arm and conversation to feedback about these requests, as far as their results are stored. In
    a transaction that acts for all tenants. Returns to how many rows."""
    return connection.execute(_ADD_VERSIONS, (tenants, request_ids)).rowcount


class FeedbackWatch(Watch):
    """Looks once a minute. Every recorder of a fleet shows the same. ``on_failure`` is called on the thread with the
    error that ended it; Postgres that does not answer is none."""

    def __init__(self, dsn: str, on_failure: Callable[[BaseException], None], wall_clock: ClockMs = now_ms) -> None:
        super().__init__("feedback-watch", _INTERVAL_S, on_failure)
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S)
        self._wall_clock = wall_clock
        self._shown: set[tuple[str, str, str]] = set()

    def close(self) -> None:
        self._kept.close()

    def look(self) -> None:
        """Add model versions, remove feedback without a result, and show the ratings of the last day, once."""
        try:
            self._remove_unanswered()
            with self._kept.transaction(ALL_TENANTS) as connection:
                missed = connection.execute(_MISSED, (_MOST_AT_ONCE,)).fetchall()
                add_model_versions(connection, [tenant for tenant, _ in missed], [one for _, one in missed])
            with self._kept.transaction(ALL_TENANTS) as connection:
                sums = read_feedback_scores(connection, self._wall_clock() - SHOWN_MS, most=_MOST_SHOWN)
        except psycopg.Error as error:
            log.warning("feedback_not_summed_up", reason=reason(error))
            return
        self._show({(one.model, one.model_version, one.arm): one for one in sums})

    def _remove_unanswered(self) -> None:
        removed = _MOST_AT_ONCE
        while removed == _MOST_AT_ONCE and not self._stopping.is_set():
            with self._kept.transaction(ALL_TENANTS) as connection:
                removed = connection.execute(_REMOVE_UNANSWERED, (_MOST_AT_ONCE,)).rowcount

    def _show(self, sums: dict[tuple[str, str, str], ScoreSums]) -> None:
        metrics.show(metrics.RATED_REQUESTS, {place: one.count for place, one in sums.items()}, self._shown)
        means = {place: one.mean for place, one in sums.items()}
        self._shown = metrics.show(metrics.SATISFACTION_RATIO, means, self._shown)
