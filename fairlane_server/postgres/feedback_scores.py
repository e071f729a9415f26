"""Sums of ratings by model version and arm, in Postgres. Read-only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.settings import Settings
from fairlane_server.postgres.reading import reading

if TYPE_CHECKING:
    import psycopg

_APPLICATION = "fairlane-feedback"
_TIMEOUT_S = 30.0

# One rating per request: of several givers the mean, so that who rates a request twice under two names has no more say.
_SUMS = b"""
SELECT model, model_version, arm, count(*), sum(rating), sum(rating * rating) FROM (
    SELECT model, model_version, coalesce(arm, '') AS arm, tenant, request_id, avg(rating) AS rating FROM feedback
    WHERE rating IS NOT NULL AND model IS NOT NULL AND given_at_ms >= %(since_ms)s
        AND (%(model)s::text IS NULL OR model = %(model)s)
        AND (%(arms)s::text[] IS NULL OR coalesce(arm, '') = ANY(%(arms)s))
    GROUP BY 1, 2, 3, 4, 5
) AS rated GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT %(most)s
"""
MOST_ARMS = 1_000


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Ratings from 0 to 1 of the requests that one version answered on one arm. A thumb up is 1, one down 0.

    Attributes:
        arm: "" for requests from before arms were recorded.
        count: of rated requests; several ratings of one are one, their mean.
        total: sum of the ratings.
        squares: sum of their squares.
    """

    model: str
    model_version: str
    arm: str
    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of the sample, without bias; 0 for a single rating."""
        if self.count < 2:
            return 0.0
        # Rounding may leave a little less than nothing.
        return max(0.0, (self.squares - self.total * self.mean) / (self.count - 1))


def feedback_scores(
    settings: Settings,
    since_ms: int,
    model: str | None = None,
    arms: Sequence[str] | None = None,
    tenant: str | None = None,
) -> list[ScoreSums]:
    """As ``read_feedback_scores``, with a connection of its own; of one tenant or, as a trusted service, of all. Raises
    as ``reading``."""
    with reading(settings, _APPLICATION, _TIMEOUT_S, tenant) as connection:
        return read_feedback_scores(connection, since_ms, model, arms)


def read_feedback_scores(
    connection: "psycopg.Connection",
    since_ms: int,
    model: str | None = None,
    arms: Sequence[str] | None = None,
    most: int = MOST_ARMS,
) -> list[ScoreSums]:
    """Ratings given since this time, by model, version and arm, those with the most ratings first.

    In the caller's transaction: of the tenants that it acts for. Raises psycopg.Error.

    Args:
        connection: whose role may read ``feedback``.
        since_ms: since the epoch, by the broker's clock.
        model: of this model alone.
        arms: of these arms alone.
        most: at most so many.
    """
    asked = {"since_ms": since_ms, "model": model, "arms": None if arms is None else list(arms), "most": most}
    return [ScoreSums(*row) for row in connection.execute(_SUMS, asked)]
