"""Costs by the hour in Postgres, of all tenants that spend. Read-only, as a trusted service."""

from typing import TYPE_CHECKING

from fairlane.money import NANOS_PER_UNIT
from fairlane.settings import Settings
from fairlane_server.costs.anomalies import HourlyCost, HourlySpending, compared_hours, judge
from fairlane_server.postgres.reading import reading

if TYPE_CHECKING:
    import psycopg

HOUR_MS = 3_600_000

_APPLICATION = "fairlane-anomalies"
_TIMEOUT_S = 30.0

_COSTS = b"""
SELECT tenant, currency, hour, cost_nanos FROM usage_hourly
WHERE hour * 3600000 = ANY(%s)
    AND tenant IN (SELECT tenant FROM usage_hourly WHERE hour * 3600000 = ANY(%s) AND cost_nanos > 0)
"""
_FIRST = b"""
SELECT tenant, min(hour) FROM usage_hourly
WHERE tenant IN (SELECT tenant FROM usage_hourly WHERE hour * 3600000 = ANY(%s) AND cost_nanos > 0) GROUP BY tenant
"""


def hourly_spending(settings: Settings, now_ms: int) -> list[HourlySpending]:
    """As ``read_hourly_spending``, with a connection of its own. Raises as ``reading``."""
    with reading(settings, _APPLICATION, _TIMEOUT_S) as connection:
        return read_hourly_spending(connection, now_ms, settings.spend_anomaly_least * NANOS_PER_UNIT)


def read_hourly_spending(connection: "psycopg.Connection", now_ms: int, least_nanos: int) -> list[HourlySpending]:
    """The present hour and the one before against the history of each tenant. In a transaction that acts for all
    tenants. Raises psycopg.Error."""
    hour = now_ms // HOUR_MS
    present = [HOUR_MS * at for at in (hour, hour - 1)]
    compared = sorted({hour, hour - 1, *compared_hours(hour), *compared_hours(hour - 1)})
    # By the index of old rows.
    rows = connection.execute(_COSTS, ([HOUR_MS * at for at in compared], present)).fetchall()
    first = connection.execute(_FIRST, (present,)).fetchall()
    costs = [HourlyCost(tenant, currency, int(at), int(nanos)) for tenant, currency, at, nanos in rows]
    return judge(costs, {tenant: int(at) for tenant, at in first}, hour, least_nanos)
