"""Sums of usage and costs in Postgres. Read-only, under row-level security."""

from collections.abc import Sequence

from fairlane.settings import Settings
from fairlane_server.costs.daily_sums import SumQuery, UsageSum, sum_of, sum_question
from fairlane_server.postgres.reading import reading

_APPLICATION = "fairlane-costs"
_TIMEOUT_S = 60.0


def read_sums(settings: Settings, query: SumQuery, tenant: str | None = None) -> Sequence[UsageSum]:
    """The sums of one tenant or, as a trusted service, of all, in the order of the groups. Raises as
    ``reading``."""
    statement, parameters = sum_question(query)
    with reading(settings, _APPLICATION, _TIMEOUT_S, tenant) as connection:
        rows = connection.execute(statement, parameters).fetchall()
    return [sum_of(row, len(query.by)) for row in rows]
