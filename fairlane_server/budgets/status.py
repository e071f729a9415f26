"""What is spent and reserved of each budget of a tenant, for those who ask. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from fairlane.money import nanos_text
from fairlane.outcomes import BudgetPeriod, BudgetScope
from fairlane.records import Budget, TenantSpec
from fairlane_server.budgets.budgets import concerns, date_of, day_of, renews_at_ms, since
from fairlane_server.costs.daily_sums import UsageSum

MOST_CALLERS_SHOWN = 50
"""Of a budget of each key or user: those that spent most."""


@dataclass(frozen=True, slots=True)
class DailyCost:
    """What was spent on a day in one currency: by the tenant (``caller`` None), or by one caller."""

    caller: str | None
    day: date
    currency: str
    nanos: int


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """One budget, of one caller if it is not the tenant's. ``reserved_nanos`` is None while no dispatcher reports."""

    tenant: str
    budget: Budget
    caller: str | None
    spent_nanos: int
    reserved_nanos: int | None
    renews_at_ms: int

    def as_plain(self) -> dict[str, object]:
        """As JSON values; amounts are exact decimal numbers as text."""
        amounts = {
            "soft": self.budget.soft_nanos,
            "hard": self.budget.hard_nanos,
            "spent": self.spent_nanos,
            "reserved": self.reserved_nanos,
        }
        return {
            "tenant": self.tenant,
            "of": self.budget.of,
            "caller": self.caller,
            "period": self.budget.period,
            "currency": self.budget.currency,
            **{name: None if nanos is None else nanos_text(nanos) for name, nanos in amounts.items()},
            "at_soft": "degrade" if self.budget.degrade else "warn",
            "renews_at_ms": self.renews_at_ms,
        }


def daily_costs(sums: Iterable[UsageSum], caller: str | None = None) -> list[DailyCost]:
    """The costs among sums by day, and perhaps by caller; without that group they are of ``caller``."""
    found = []
    for one in sums:
        day, *callers = one.keys
        if isinstance(day, date) and one.currency is not None and one.cost_nanos is not None:
            found.append(DailyCost(str(callers[0]) if callers else caller, day, one.currency, one.cost_nanos))
    return found


def statuses(
    spec: TenantSpec,
    costs: Sequence[DailyCost],
    reserved: Mapping[str | None, int] | None,
    now_ms: int,
    *,
    only: str | None = None,
) -> list[BudgetStatus]:
    """The state of each budget, in the order of the specification. ``costs`` are those of this month, ``reserved`` is
    by caller (None: of the tenant). Of budgets of each key or user those that spent most, or that of ``only``."""
    found = []
    for budget in spec.budgets:
        spent, held = _spent_by_account(budget, costs, now_ms), reserved or {}
        accounts: list[str | None] = [None]
        if budget.of in (BudgetScope.EACH_KEY, BudgetScope.EACH_USER):
            known = (*spent, *held) if only is None else (only,)
            named = {caller for caller in known if caller is not None and concerns(budget, caller)}
            ordered = sorted(named, key=lambda caller: (-spent.get(caller, 0), caller))
            accounts = [*ordered[:MOST_CALLERS_SHOWN]]
        elif budget.of != BudgetScope.TENANT:
            accounts = [budget.of]
        renews_ms = renews_at_ms(budget.period, now_ms)
        for account in accounts:
            own = None if reserved is None else held.get(account, 0)
            found.append(BudgetStatus(spec.tenant, budget, account, spent.get(account, 0), own, renews_ms))
    return found


def _spent_by_account(budget: Budget, costs: Iterable[DailyCost], now_ms: int) -> dict[str | None, int]:
    today, first = date_of(day_of(now_ms)), since(now_ms)
    spent: dict[str | None, int] = {}
    for cost in costs:
        in_period = cost.day == today if budget.period == BudgetPeriod.DAY else cost.day >= first
        if in_period and cost.currency == budget.currency:
            spent[cost.caller] = spent.get(cost.caller, 0) + cost.nanos
    return spent
