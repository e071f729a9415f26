"""Budgets of a tenant: which are valid, whom they concern, and when they renew. Pure."""

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta

from fairlane.money import LARGEST_NANOS, nanos_text
from fairlane.outcomes import BudgetPeriod, BudgetScope
from fairlane.record_bounds import MAX_REQUESTED_BY_CHARS
from fairlane.records import Budget, BudgetNotice, TenantSpec
from fairlane_server.costs.price_book import CURRENCY

MOST_BUDGETS = 32
"""Of one tenant: every request is checked against those that concern it."""

KEY, USER = "key:", "user:"
"""How the names of callers begin, as the gateway writes them."""

CLOCKS_WITHIN_MS = 5_000
"""How far the clocks of dispatchers and consumers may differ. Usage is dated by the clock of its consumer: for so long
before and after a renewal what is spent now may count in either period, and a request must fit both."""

DAY_MS = 86_400_000
_EPOCH, _MONTHS_PER_YEAR = date(1970, 1, 1), 12
_LAST_DAY = 2_932_896
"""The last day of the year 9999: a broken clock must not end a process."""


def check_budgets(spec: TenantSpec) -> None:
    """Check the budgets of a published specification, which need not come from a file. Raises ValueError."""
    if len(spec.budgets) > MOST_BUDGETS:
        raise ValueError(f"budgets: at most {MOST_BUDGETS}")
    for budget in spec.budgets:
        check_budget(budget)
    places = [(budget.of, budget.period) for budget in spec.budgets]
    if len(set(places)) < len(places):
        raise ValueError("budgets: two of the same callers and the same period")
    if len({budget.currency for budget in spec.budgets}) > 1:
        raise ValueError("budgets: all of a tenant must be in one currency")


def check_budget(budget: Budget) -> None:
    """Raises ValueError."""
    if budget.of not in tuple(BudgetScope) and not is_caller(budget.of):
        raise ValueError(f"budget of: must be one of {', '.join(BudgetScope)}, or key:ID or user:SUBJECT")
    if budget.period not in tuple(BudgetPeriod):
        raise ValueError(f"budget period: must be one of {', '.join(BudgetPeriod)}")
    if CURRENCY.fullmatch(budget.currency) is None:
        raise ValueError(f"budget currency: {budget.currency!r} does not match {CURRENCY.pattern}")
    amounts = [nanos for nanos in (budget.soft_nanos, budget.hard_nanos) if nanos is not None]
    if not amounts:
        raise ValueError("budget: neither soft nor hard")
    if not all(0 <= nanos <= LARGEST_NANOS for nanos in amounts):
        raise ValueError(f"budget: amounts must be from 0 to {nanos_text(LARGEST_NANOS)}")
    if budget.soft_nanos is not None and budget.hard_nanos is not None and budget.soft_nanos > budget.hard_nanos:
        raise ValueError("budget: soft is more than hard")
    if budget.degrade and budget.soft_nanos is None:
        raise ValueError("budget: requests are reduced from a soft amount on, and there is none")


def is_caller(name: str) -> bool:
    """Whether this is the name of one caller of the gateway."""
    prefix = next((prefix for prefix in (KEY, USER) if name.startswith(prefix)), None)
    return prefix is not None and len(prefix) < len(name) <= MAX_REQUESTED_BY_CHARS


def concerns(budget: Budget, caller: str | None) -> bool:
    """Whether a request of this caller counts towards the budget."""
    match budget.of:
        case BudgetScope.TENANT:
            return True
        case BudgetScope.EACH_KEY:
            return caller is not None and caller.startswith(KEY)
        case BudgetScope.EACH_USER:
            return caller is not None and caller.startswith(USER)
    return caller == budget.of


def counts_callers(budgets: Iterable[Budget]) -> bool:
    """Whether spending must be known by caller."""
    return any(budget.of != BudgetScope.TENANT for budget in budgets)


def account_of(budget: Budget, caller: str | None) -> str | None:
    """Whose spending counts: that of this caller, or of the whole tenant (None)."""
    return None if budget.of == BudgetScope.TENANT else caller


def day_of(at_ms: int) -> int:
    """Days since the epoch, as the daily sums count them."""
    return min(max(at_ms // DAY_MS, 0), _LAST_DAY)


def month_of(day: int) -> int:
    """Months since the epoch."""
    at = date_of(day)
    return (at.year - _EPOCH.year) * _MONTHS_PER_YEAR + at.month - 1


def first_day_of(month: int) -> int:
    """Days from the epoch to the first day of a month."""
    year, index = divmod(month, _MONTHS_PER_YEAR)
    return days_to(date(_EPOCH.year + year, index + 1, 1))


def date_of(day: int) -> date:
    """The date that is ``day`` days after the epoch."""
    return _EPOCH + timedelta(days=day)


def days_to(at: date) -> int:
    """Days from the epoch to a date."""
    return (at - _EPOCH).days


def since(now_ms: int) -> date:
    """The first day that any budget is about now."""
    return date_of(first_day_of(month_of(day_of(now_ms))))


def renews_at_ms(period: str, now_ms: int) -> int:
    """When the period that contains ``now_ms`` ends."""
    day = day_of(now_ms)
    ends = day + 1 if period == BudgetPeriod.DAY else first_day_of(month_of(day) + 1)
    return ends * DAY_MS


def utc_text(at_ms: int) -> str:
    """A time as text, to the second: ``2026-12-01T00:00:00Z``."""
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def budget_name(budget: Budget | BudgetNotice) -> str:
    """The budget in words: ``month budget of the tenant``."""
    whose = budget.of
    if budget.of == BudgetScope.TENANT:
        whose = "the tenant"
    elif isinstance(budget, BudgetNotice):
        whose = budget.caller or budget.of
    return f"{budget.period} budget of {whose}"


def amounts_of(budget: Budget) -> Iterator[tuple[str, int]]:
    """The limits of a budget, by name."""
    if budget.soft_nanos is not None:
        yield "soft", budget.soft_nanos
    if budget.hard_nanos is not None:
        yield "hard", budget.hard_nanos
