"""What one tenant has spent and reserved, as a whole and by caller. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import BudgetPeriod
from fairlane.records import Budget, UsageEvent
from fairlane_server.budgets.budgets import account_of, concerns, day_of, month_of

MOST_CALLERS = 10_000
"""Callers of a tenant with amounts of their own. Others share one: a tenant's programs may name any number."""


OTHER_CALLERS = ""
"""Those that share one amount. No caller has this name."""


@dataclass(slots=True)
class Amounts:
    """Spent by day and month, and reserved: of requests that are queued here, and of work in flight anywhere."""

    days: dict[int, int] = field(default_factory=dict)
    months: dict[int, int] = field(default_factory=dict)
    queued: int = 0
    in_flight: int = 0
    batch: int = 0
    """The part of both that is of batch jobs."""
    promised: int = 0
    """What batch jobs have reserved as a whole: of their rows without a result."""

    def reserved(self, *, for_batch: bool) -> int:
        """What is not free for a request: of the jobs' reservations, those of rows that are not here yet count for
        other requests only."""
        return self.queued + self.in_flight + (0 if for_batch else max(0, self.promised - self.batch))

    def spend(self, day: int, nanos: int) -> None:
        """Add what was spent on a day."""
        self.days[day] = self.days.get(day, 0) + nanos
        month = month_of(day)
        self.months[month] = self.months.get(month, 0) + nanos

    def spent(self, period: str, now_ms: int) -> int:
        """What was spent in the period that contains ``now_ms``."""
        day = day_of(now_ms)
        return self.days.get(day, 0) if period == BudgetPeriod.DAY else self.months.get(month_of(day), 0)

    def forget_spending(self, before_day: int) -> None:
        """Forget what was spent before the day, and in the months before that of the day."""
        self.days = {day: nanos for day, nanos in self.days.items() if day >= before_day}
        month = month_of(before_day)
        self.months = {known: nanos for known, nanos in self.months.items() if known >= month}

    def is_idle(self, now_ms: int) -> bool:
        """Whether nothing is reserved, and nothing was spent in the present month."""
        return not (self.queued or self.in_flight or self.promised or self.spent(BudgetPeriod.MONTH, now_ms))


@frozen_dataclass(frozen=True, slots=True)
class Spending:
    """One row of what was spent: of the tenant (``caller`` None), of one caller, or of OTHER_CALLERS."""

    caller: str | None
    day: int
    nanos: int


@dataclass(slots=True)
class Account:
    """Amounts of a tenant with budgets. ``budgets`` may be replaced at any time."""

    budgets: tuple[Budget, ...]
    whole: Amounts = field(default_factory=Amounts)
    callers: dict[str, Amounts] = field(default_factory=dict)
    other_callers: Amounts = field(default_factory=Amounts)

    @property
    def currency(self) -> str:
        return self.budgets[0].currency

    def concerning(self, caller: str | None) -> Iterator[tuple[Budget, Amounts]]:
        """The budgets that a request of this caller counts towards, each with its amounts."""
        for budget in self.budgets:
            if concerns(budget, caller):
                yield budget, self.whole if account_of(budget, caller) is None else self.of(caller)

    def of(self, caller: str | None) -> Amounts:
        """The amounts of a caller; those that others share if it has none."""
        return self.callers.get(caller or "", self.other_callers)

    def spend(self, caller: str | None, day: int, nanos: int, now_ms: int) -> None:
        """Add what a request cost."""
        for amounts in self.counted(caller, now_ms):
            amounts.spend(day, nanos)

    def counted(self, caller: str | None, now_ms: int) -> tuple[Amounts, ...]:
        """The amounts that a request of this caller changes."""
        if caller is None or not self._counts(caller):
            return (self.whole,)
        return self.whole, self._of_caller(caller, now_ms)

    def replace_spending(self, rows: Iterable[Spending], now_ms: int) -> None:
        """Set what was spent. Reservations stay."""
        for amounts in self._all():
            amounts.days, amounts.months = {}, {}
        for row in rows:
            if row.caller is None:
                self.whole.spend(row.day, row.nanos)
            elif row.caller == OTHER_CALLERS:
                self.other_callers.spend(row.day, row.nanos)
            elif self._counts(row.caller):
                self._of_caller(row.caller, now_ms).spend(row.day, row.nanos)

    def promise(self, jobs: Mapping[str | None, int], now_ms: int) -> None:
        """Set what batch jobs have reserved as a whole: in all (None), and by caller."""
        for amounts in self._all():
            amounts.promised = 0
        self.whole.promised = jobs.get(None, 0)
        for caller, nanos in jobs.items():
            if caller is not None and self._counts(caller):
                self._of_caller(caller, now_ms).promised += nanos

    def forget_old(self, now_ms: int) -> None:
        """Forget spending that no budget can be about any more, and callers without any."""
        for amounts in self._all():
            amounts.forget_spending(day_of(now_ms))
        self.callers = {name: amounts for name, amounts in self.callers.items() if not amounts.is_idle(now_ms)}

    def _all(self) -> tuple[Amounts, ...]:
        return self.whole, self.other_callers, *self.callers.values()

    def _counts(self, caller: str) -> bool:
        return any(account_of(budget, caller) is not None and concerns(budget, caller) for budget in self.budgets)

    def _of_caller(self, caller: str, now_ms: int) -> Amounts:
        known = self.callers.get(caller)
        if known is not None:
            return known
        # Once a caller shares amounts, what it spent is in them until they are idle.
        if len(self.callers) >= MOST_CALLERS or not self.other_callers.is_idle(now_ms):
            return self.other_callers
        made = self.callers[caller] = Amounts()
        return made


def spending_of(event: UsageEvent, currency: str) -> Spending | None:
    """What a usage event adds to budgets in this currency; None: nothing."""
    cost = event.cost
    if cost is None or cost.nanos <= 0 or cost.currency != currency:
        return None
    return Spending(event.requested_by, day_of(event.occurred_at_ms), cost.nanos)
