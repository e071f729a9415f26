"""Every change of a model's route, from the table that the recorder fills."""

from dataclasses import dataclass
from typing import Any

from fairlane.settings import Settings
from fairlane_server.postgres.reading import reading

_TIMEOUT_S = 10.0
_CHANGES = """
SELECT revision, aliases, previous, rules, stopped, changed_at_ms, changed_by, reason, managed_by
FROM model_routes WHERE model = %s ORDER BY log_topic, log_partition, log_offset DESC LIMIT %s
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


def read_model_history(settings: Settings, model: str, most: int) -> tuple[RouteChange, ...]:
    """The newest changes of a model's route, newest first. Raises DatabaseError."""
    with reading(settings, "fairlane-models", _TIMEOUT_S) as connection:
        return tuple(RouteChange(*row) for row in connection.execute(_CHANGES, (model, most)))
