"""Every change of a model's route, from the table that the recorder fills."""

from dataclasses import dataclass
from typing import Any

from fairlane.settings import Settings
from fairlane_server.postgres.reading import reading

_TIMEOUT_S = 10.0
_CHANGES = """
SELECT revision, aliases, previous, rules, stopped, changed_at_ms, changed_by, reason, managed_by, rollout
FROM model_routes WHERE model = %s ORDER BY log_topic, log_partition, log_offset DESC LIMIT %s
"""

# A change of something else repeats the rollout as it was.
_DECISIONS = """
SELECT revision, aliases, previous, rules, stopped, changed_at_ms, changed_by, reason, managed_by, rollout
FROM (
    SELECT *, lag(rollout) OVER (ORDER BY log_offset) AS rollout_before FROM model_routes WHERE model = %s
) AS changes
WHERE rollout IS DISTINCT FROM rollout_before AND rollout ->> 'rollout' = coalesce(%s, (
    SELECT rollout ->> 'rollout' FROM model_routes WHERE %s::text IS NULL AND model = %s AND rollout IS NOT NULL
    ORDER BY log_offset DESC LIMIT 1
))
ORDER BY log_offset DESC LIMIT %s
"""


@dataclass(frozen=True, slots=True)
class RouteChange:
    """A route as a change left it. The revision 0 took it back."""

    revision: int
    aliases: dict[str, str]
    previous: dict[str, str]
    rules: list[dict[str, Any]]
    stopped: list[str]
    changed_at_ms: int
    changed_by: str
    reason: str
    managed_by: str
    rollout: dict[str, Any] | None


def read_model_history(settings: Settings, model: str, most: int) -> tuple[RouteChange, ...]:
    """The newest changes of a model's route, newest first. Raises DatabaseError."""
    with reading(settings, "fairlane-models", _TIMEOUT_S) as connection:
        return tuple(RouteChange(*row) for row in connection.execute(_CHANGES, (model, most)))


def read_rollout_decisions(settings: Settings, model: str, rollout: str | None, most: int) -> tuple[RouteChange, ...]:
    """The decisions of a rollout, oldest first; of the model's latest one if none is named. At most so many, the newest
    ones. Raises DatabaseError."""
    with reading(settings, "fairlane-models", _TIMEOUT_S) as connection:
        found = [RouteChange(*row) for row in connection.execute(_DECISIONS, (model, rollout, rollout, model, most))]
    return tuple(reversed(found))
