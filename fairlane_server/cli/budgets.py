"""``fairlane budgets``: what is spent and reserved of the budgets, and when they renew."""

from collections.abc import Sequence

from fairlane.clock import now_ms
from fairlane.money import nanos_text
from fairlane.outcomes import BudgetScope
from fairlane.records import TenantSpec
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.budgets.budgets import counts_callers, since
from fairlane_server.budgets.status import BudgetStatus, DailyCost, daily_costs, statuses
from fairlane_server.cli.output import AsJson, BootstrapServers, OneTenant, settings_with, show_list, utc
from fairlane_server.costs.daily_sums import Group, SumQuery
from fairlane_server.kafka.load_board import LoadBoard, LoadView
from fairlane_server.kafka.load_feed import LoadFeed
from fairlane_server.postgres.usage_sums import read_sums

# Dispatchers report their reservations once a second.
_SETTLE_S = 1.2

_COLUMNS = ("tenant", "of", "period", "soft", "hard", "spent", "reserved", "currency", "renews (UTC)")


def budgets_command(
    bootstrap_servers: BootstrapServers = None, tenant: OneTenant = None, *, as_json: AsJson = False
) -> None:
    """Show the budgets of the tenants: limits, what is spent and reserved, and when they renew.

    Limits and reservations come from Kafka, what is spent from the tables that the recorder fills (POSTGRES_DSN).
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    board = LoadBoard()
    feed = LoadFeed(settings, codec_for(settings), board)
    try:
        feed.catch_up()
        feed.follow(_SETTLE_S)
    finally:
        feed.close()
    at_ms = now_ms()
    view = board.view(at_ms)
    specs = [spec for spec in board.specs if spec.budgets and tenant in (None, spec.tenant)]
    found = [one for spec in specs for one in _statuses(settings, spec, view, at_ms)]
    show_list(
        "budgets",
        found,
        _COLUMNS,
        _row,
        to_json=BudgetStatus.as_plain,
        empty="no tenant has a budget",
        as_json=as_json,
    )


def _statuses(settings: Settings, spec: TenantSpec, view: LoadView, at_ms: int) -> list[BudgetStatus]:
    costs = _costs(settings, spec.tenant, (Group.DAY,), at_ms)
    if counts_callers(spec.budgets):
        costs += _costs(settings, spec.tenant, (Group.DAY, Group.CALLER), at_ms)
    return statuses(spec, costs, view.reserved(spec.tenant), at_ms)


def _costs(settings: Settings, tenant: str, by: tuple[Group, ...], at_ms: int) -> list[DailyCost]:
    return daily_costs(read_sums(settings, SumQuery(by, since=since(at_ms)), tenant))


def _row(one: BudgetStatus) -> Sequence[str]:
    amounts = (one.budget.soft_nanos, one.budget.hard_nanos, one.spent_nanos, one.reserved_nanos)
    of = one.budget.of if one.budget.of == BudgetScope.TENANT else one.caller or one.budget.of
    texts = ("-" if nanos is None else nanos_text(nanos) for nanos in amounts)
    return (one.tenant, of, one.budget.period, *texts, one.budget.currency, utc(one.renews_at_ms))
