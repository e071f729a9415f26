"""``fairlane anomalies``: hours in which tenants spend far more than they used to."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fairlane.clock import now_ms
from fairlane.money import nanos_text
from fairlane_server.cli.output import AsJson, OneTenant, settings_with, show_list, utc
from fairlane_server.costs.anomalies import HourlySpending
from fairlane_server.postgres.hourly_costs import HOUR_MS, hourly_spending

_COLUMNS = ("tenant", "hour (UTC)", "spent", "usually", "limit", "currency", "unusual")

All = Annotated[bool, typer.Option("--all", help="Also of tenants that spend no more than usual.")]


def anomalies_command(tenant: OneTenant = None, *, every: All = False, as_json: AsJson = False) -> None:
    """Show who spends far more in this hour or the one before than in the same hour of the last two weeks.

    From the tables that the recorder fills (POSTGRES_DSN).
    """
    settings = settings_with()
    found = [
        one for one in hourly_spending(settings, now_ms()) if (every or one.is_anomaly) and tenant in (None, one.tenant)
    ]
    show_list("hours", found, _COLUMNS, _row, to_json=_plain, empty="nobody spends unusually much", as_json=as_json)


def _row(one: HourlySpending) -> Sequence[str]:
    limit = "-" if one.limit_nanos is None else nanos_text(one.limit_nanos)
    hour = utc(one.hour * HOUR_MS)
    unusual = "yes" if one.is_anomaly else "no"
    return one.tenant, hour, nanos_text(one.nanos), nanos_text(one.median_nanos), limit, one.currency, unusual


def _plain(one: HourlySpending) -> dict[str, object]:
    return {
        "tenant": one.tenant,
        "hour_at_ms": one.hour * HOUR_MS,
        "currency": one.currency,
        "spent": nanos_text(one.nanos),
        "usually": nanos_text(one.median_nanos),
        "limit": None if one.limit_nanos is None else nanos_text(one.limit_nanos),
        "is_anomaly": one.is_anomaly,
    }
