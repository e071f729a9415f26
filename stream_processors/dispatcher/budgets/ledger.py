"""Ledger of budgets: what tenants with budgets have spent and reserved, as one dispatcher knows it. Pure.

*Spent.* The log is the truth. A tenant's spending is known once its sums were read from Postgres together with the
recorder's offsets of ``ledger.usage``, if the recorder was not behind the offset from which this dispatcher follows the
log: what is below the recorder's offsets is in the sums, what is not is in the log that was read here. From then on
each event is added once, by its offset. So dispatchers that have read as far agree, whatever was killed or replayed.

*Reserved.* The estimate of a request is reserved from its admission until its usage is read, or until it ends without
running. Work that was dispatched, by any dispatcher, carries its estimate in a header, so its reservation is in the log
as well; only the queue of another dispatcher is not seen.

*The bound.* With ``spent`` what this dispatcher has read, a request is admitted if

    spent < hard  and  spent + in flight + queued here + its estimate <= hard

and dispatched if that holds without ``queued here``. Since ``spent`` is exactly the sum of the usage read, and a
request is admitted only below the limit: what is ever spent <= hard + the cost of the requests that were admitted
(anywhere) and whose usage was not read at the last admission. With estimates that are not too low and one dispatcher
that is <= hard.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import BudgetScope
from fairlane.records import Budget, BudgetLoad, BudgetNotice, SourceCoordinate, UsageEvent
from fairlane_server.budgets.budgets import CLOCKS_WITHIN_MS, account_of, concerns, counts_callers, day_of, renews_at_ms
from stream_processors.dispatcher.budgets.accounts import Account, Amounts, Spending, spending_of
from stream_processors.dispatcher.budgets.reservations import Reservation, Reservations
from stream_processors.dispatcher.scheduling.in_flight import WorkId

GRACE_MS = 10_000
"""A hard amount for a tenant or callers that had none before takes effect when the spending is known, or after this
time."""

_MOST_UNREAD_EVENTS = 100_000
_HARD, _SOFT = "hard", "soft"


@frozen_dataclass(frozen=True, slots=True)
class ReadUsage:
    """A record of ``ledger.usage``, where it was read. Without an ``event`` it cannot be read, or is the last one of a
    range that cannot."""

    partition: int
    offset: int
    event: UsageEvent | None


@frozen_dataclass(frozen=True, slots=True)
class SpendingBase:
    """Sums of a tenant's costs, and the offset by partition up to which usage is in them."""

    offsets: Mapping[int, int]
    rows: Sequence[Spending]


@frozen_dataclass(frozen=True, slots=True)
class Judgement:
    """What the budgets say about one request.

    Attributes:
        refused: the hard budget that it does not fit; the one that renews last.
        retry_after_ms: of a refusal: until that budget renews, or until reservations may be settled for less. None for
            a request that is larger than the budget.
        is_unknown: refused because the spending is not known.
        soft: the soft budget that is exceeded most, if any is; also of a request that is refused.
        degrade: whether an exceeded budget asks for reduced requests.
    """

    refused: BudgetNotice | None = None
    retry_after_ms: int | None = None
    is_unknown: bool = False
    soft: BudgetNotice | None = None
    degrade: bool = False

    @property
    def is_refusal(self) -> bool:
        return self.is_unknown or self.refused is not None


WITHIN = Judgement()
UNKNOWN = Judgement(is_unknown=True)

_SETTLED_WITHIN_MS = 2_000


@dataclass(slots=True)
class _Tenant:
    """While sums are wanted, ``unread`` holds the events read from ``began`` on.

    Attributes:
        base: the offsets up to which usage is in the sums that are known; None: nothing is known.
        unknown_of: the ``of`` of budgets whose spending is not in these sums.
        lenient_until_ms: by ``of``: hard amounts that limited nobody before; unknown, they refuse nothing until then.
    """

    account: Account
    began: dict[int, int]
    unread: deque[ReadUsage] = field(default_factory=deque)
    base: Mapping[int, int] | None = None
    unknown_of: frozenset[str] = frozenset()
    lenient_until_ms: dict[str, int] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the spending that all budgets are about is known."""
        return self.base is not None and not self.unknown_of

    def knows(self, budget: Budget) -> bool:
        return self.base is not None and budget.of not in self.unknown_of

    def may_refuse(self, budget: Budget, now_ms: int) -> bool:
        """Whether this budget refuses requests while its spending is unknown."""
        return budget.hard_nanos is not None and now_ms >= self.lenient_until_ms.get(budget.of, 0)

    def restart(self, positions: Mapping[int, int]) -> None:
        """Nothing is known any more."""
        self.base = None
        self.collect(positions)

    def collect(self, positions: Mapping[int, int]) -> None:
        """Collect what is read from here on for sums that are to come."""
        self.began = dict(positions)
        self.unread.clear()


class BudgetLedger:
    """For one thread. Without budgets every operation returns at once."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._positions: dict[int, int] = {}
        """The next offset of each partition of ``ledger.usage``."""
        self._is_started = False
        self._limited: set[tuple[str, str]] = set()
        """Tenant and ``of`` of every hard budget since the start: removed and set again it is not a new one."""
        self._pruned_day = 0
        self.reservations = Reservations()

    # ------------------------------------------------------------------ budgets and spending

    def set_budgets(self, budgets: Mapping[str, tuple[Budget, ...]], now_ms: int) -> None:
        """Set the budgets of all tenants that have any."""
        for name in self._tenants.keys() - budgets.keys():
            del self._tenants[name]
            self.reservations.forget(name)
        for name, wanted in budgets.items():
            tenant = self._tenants.get(name)
            if tenant is None:
                tenant = self._tenants[name] = _Tenant(Account(wanted), dict(self._positions))
            elif tenant.account.budgets != wanted:
                before, tenant.account.budgets = tenant.account.budgets, wanted
                added = _callers_of(wanted) - _callers_of(before)
                tenant.unknown_of = (tenant.unknown_of & _callers_of(wanted)) | added
                if before[0].currency != wanted[0].currency:
                    tenant.restart(self._positions)
                elif added:
                    tenant.collect(self._positions)
            for budget in wanted:
                if budget.hard_nanos is not None and (name, budget.of) not in self._limited:
                    self._limited.add((name, budget.of))
                    if self._is_started:
                        tenant.lenient_until_ms[budget.of] = now_ms + GRACE_MS
        self._is_started = True

    def started(self, partition: int, offset: int) -> None:
        """Reading of a partition of ``ledger.usage`` starts here. What was known until then cannot be continued, unless
        it starts where reading had come to."""
        if self._positions.get(partition) == offset:
            return
        self._positions[partition] = offset
        for tenant in self._tenants.values():
            tenant.restart(self._positions)

    def read(self, usage: Iterable[ReadUsage], now_ms: int) -> None:
        """Apply usage, in the order of offsets. What was applied before is ignored. What cannot be read may be of any
        tenant: all spending is unknown until the recorder, which may be able to read it, is behind it."""
        for one in usage:
            if one.offset < self._positions.get(one.partition, 0):
                continue
            event = one.event
            if event is None:
                self.started(one.partition, one.offset + 1)
                continue
            self._positions[one.partition] = one.offset + 1
            tenant = self._tenants.get(event.tenant)
            if tenant is None:
                continue
            self.reservations.settled(event)
            if not tenant.is_known:
                if len(tenant.unread) >= _MOST_UNREAD_EVENTS:
                    tenant.collect(self._positions)
                else:
                    tenant.unread.append(one)
            if tenant.base is not None:
                _apply(tenant, one, now_ms)

    def unknown(self) -> list[tuple[str, str, bool]]:
        """Tenants whose spending is to be read: name, currency, and whether by caller too."""
        return [wanted for name in self._tenants if (wanted := self.wanted(name)) is not None]

    def wanted(self, name: str) -> tuple[str, str, bool] | None:
        """What is to be read of a tenant's spending; None: nothing."""
        tenant = self._tenants.get(name)
        if tenant is None or tenant.is_known:
            return None
        return name, tenant.account.currency, counts_callers(tenant.account.budgets)

    def load(self, name: str, base: SpendingBase, now_ms: int) -> bool:
        """Set a tenant's spending. False if the recorder was behind the start of reading, or a day has just begun: ask
        again later."""
        tenant = self._tenants.get(name)
        if tenant is None or tenant.is_known:
            return True
        if not self._positions or any(base.offsets.get(place, 0) < began for place, began in tenant.began.items()):
            return False
        if day_of(now_ms - CLOCKS_WITHIN_MS) != day_of(now_ms):
            # The period that has just ended is not in these sums, and still counts.
            return False
        tenant.base, tenant.unknown_of = dict(base.offsets), frozenset()
        tenant.account.replace_spending(base.rows, now_ms)
        while tenant.unread:
            _apply(tenant, tenant.unread.popleft(), now_ms)
        return True

    def promise(self, name: str, jobs: Mapping[str | None, int], now_ms: int) -> None:
        """Set what the batch jobs of a tenant have reserved: in all (None), and by caller."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.account.promise(jobs, now_ms)

    def tenants(self) -> list[tuple[str, str]]:
        """The tenants with budgets, and the currency of these."""
        return [(name, tenant.account.currency) for name, tenant in self._tenants.items()]

    # ------------------------------------------------------------------ decisions

    def has_budgets(self, tenant: str) -> bool:
        return tenant in self._tenants

    def is_loaded(self) -> bool:
        """Whether the spending of every tenant with budgets is known."""
        return all(tenant.is_known for tenant in self._tenants.values())

    def currency(self, tenant: str) -> str | None:
        known = self._tenants.get(tenant)
        return None if known is None else known.account.currency

    def judge(self, tenant: str, caller: str | None, nanos: int, now_ms: int, *, is_batch: bool = False) -> Judgement:
        """Whether a request of this estimate may be admitted now. What batch jobs have reserved is there for theirs."""
        known = self._tenants.get(tenant)
        if known is None:
            return WITHIN
        refused: tuple[int, Budget, Amounts, int] | None = None
        soft: tuple[float, Budget, Amounts, int] | None = None
        degrade = is_unknown = False
        for budget, amounts in known.account.concerning(caller):
            if not known.knows(budget):
                is_unknown = is_unknown or known.may_refuse(budget, now_ms)
                continue
            at_ms = _counted_at_ms(budget, amounts, now_ms)
            spent = amounts.spent(budget.period, at_ms)
            with_it = spent + amounts.reserved(for_batch=is_batch) + nanos
            if budget.hard_nanos is not None and (spent >= budget.hard_nanos or with_it > budget.hard_nanos):
                renews_ms = renews_at_ms(budget.period, at_ms)
                if refused is None or renews_ms > refused[0]:
                    refused = renews_ms, budget, amounts, at_ms
            if budget.soft_nanos is not None and (spent >= budget.soft_nanos or with_it > budget.soft_nanos):
                degrade = degrade or budget.degrade
                part = with_it / budget.soft_nanos if budget.soft_nanos else inf
                if soft is None or part > soft[0]:
                    soft = part, budget, amounts, at_ms
        noticed = None if soft is None else _notice(_SOFT, caller, *soft[1:])
        if refused is not None:
            notice = _notice(_HARD, caller, *refused[1:])
            return Judgement(notice, _retry_after_ms(notice, nanos, now_ms), soft=noticed)
        if is_unknown:
            return UNKNOWN
        return WITHIN if noticed is None else Judgement(soft=noticed, degrade=degrade)

    def judge_dispatch(self, source: SourceCoordinate, caller: str | None, now_ms: int) -> Judgement:
        """Whether a queued request may still be dispatched: what was spent since may be more than was estimated."""
        held = self.reservations.queued(source)
        known = None if held is None else self._tenants.get(held.tenant)
        if held is None or known is None:
            return WITHIN
        for budget, amounts in known.account.concerning(caller):
            if budget.hard_nanos is None or not known.knows(budget):
                continue
            at_ms = _counted_at_ms(budget, amounts, now_ms)
            spent = amounts.spent(budget.period, at_ms)
            if spent >= budget.hard_nanos or spent + amounts.in_flight + held.nanos > budget.hard_nanos:
                notice = _notice(_HARD, caller, budget, amounts, at_ms)
                return Judgement(notice, _retry_after_ms(notice, held.nanos, now_ms))
        return WITHIN

    def reserve(
        self,
        source: SourceCoordinate,
        tenant: str,
        caller: str | None,
        nanos: int,
        now_ms: int,
        *,
        is_batch: bool = False,
    ) -> None:
        """Reserve the estimate of an admitted request, in place of an earlier one."""
        known = self._tenants.get(tenant)
        if known is not None:
            counted = known.account.counted(caller, now_ms)
            self.reservations.reserve(source, Reservation(tenant, nanos, counted, is_batch))

    def seen(
        self,
        work: WorkId,
        source: SourceCoordinate,
        tenant: str,
        caller: str | None,
        nanos: int,
        now_ms: int,
        *,
        is_batch: bool = False,
    ) -> None:
        """Reserve the estimate of work that was read back, of whichever dispatcher."""
        known = self._tenants.get(tenant)
        if known is None:
            self.reservations.release(source)
        else:
            counted = known.account.counted(caller, now_ms)
            made = Reservation(tenant, nanos, counted, is_batch, is_in_flight=True)
            self.reservations.seen(work, source, made)

    def expire(self, now_ms: int) -> int:
        """Release reservations whose end was missed, and forget old spending. Returns the number of reservations."""
        ended_ms = now_ms - CLOCKS_WITHIN_MS
        day = day_of(ended_ms)
        if day != self._pruned_day:
            self._pruned_day = day
            for tenant in self._tenants.values():
                tenant.account.forget_old(ended_ms)
        return self.reservations.expire(now_ms)

    # ------------------------------------------------------------------ reports

    def loads(self, most: int) -> tuple[BudgetLoad, ...]:
        """The reservations of all tenants with budgets, and the largest ones of callers; at most ``most``."""
        loads = [
            BudgetLoad(name, tenant.account.whole.queued, tenant.account.whole.in_flight)
            for name, tenant in self._tenants.items()
        ]
        callers = [
            BudgetLoad(name, amounts.queued, amounts.in_flight, caller)
            for name, tenant in self._tenants.items()
            for caller, amounts in tenant.account.callers.items()
            if amounts.queued or amounts.in_flight
        ]
        callers.sort(key=lambda load: -(load.queued_nanos + load.in_flight_nanos))
        return (*loads, *callers)[:most]

    def parts(self, now_ms: int) -> Iterator[tuple[str, Budget, int]]:
        """What is spent of each budget: its tenant, and the largest amount of any one caller."""
        for name, tenant in self._tenants.items():
            account = tenant.account
            for budget in filter(tenant.knows, account.budgets):
                if account_of(budget, "") is None:
                    yield name, budget, account.whole.spent(budget.period, now_ms)
                else:
                    mine = (
                        amounts.spent(budget.period, now_ms)
                        for caller, amounts in account.callers.items()
                        if concerns(budget, caller)
                    )
                    yield name, budget, max(mine, default=0)


def _apply(tenant: _Tenant, one: ReadUsage, now_ms: int) -> None:
    base = tenant.base or {}
    if one.event is not None and one.offset >= base.get(one.partition, 0):
        spending = spending_of(one.event, tenant.account.currency)
        if spending is not None:
            tenant.account.spend(spending.caller, spending.day, spending.nanos, now_ms)


def _callers_of(budgets: Iterable[Budget]) -> frozenset[str]:
    """The ``of`` of all budgets of callers: whose spending must be known besides the tenant's."""
    return frozenset(budget.of for budget in budgets if budget.of != BudgetScope.TENANT)


def _counted_at_ms(budget: Budget, amounts: Amounts, now_ms: int) -> int:
    """A time in the period that a request counts in: near a renewal that in which more was spent."""
    early_ms, late_ms = now_ms - CLOCKS_WITHIN_MS, now_ms + CLOCKS_WITHIN_MS
    if day_of(early_ms) == day_of(late_ms):
        return now_ms
    return max((early_ms, late_ms), key=lambda at_ms: amounts.spent(budget.period, at_ms))


def _retry_after_ms(notice: BudgetNotice, nanos: int, now_ms: int) -> int | None:
    if nanos > notice.limit_nanos:
        return None
    renewed_ms = notice.renews_at_ms + CLOCKS_WITHIN_MS - now_ms
    if notice.spent_nanos < notice.limit_nanos and notice.spent_nanos + nanos <= notice.limit_nanos:
        # Only reservations are in the way, which may be settled for less.
        return min(_SETTLED_WITHIN_MS, renewed_ms)
    return renewed_ms


def _notice(limit: str, caller: str | None, budget: Budget, amounts: Amounts, at_ms: int) -> BudgetNotice:
    return BudgetNotice(
        limit=limit,
        of=budget.of,
        period=budget.period,
        currency=budget.currency,
        limit_nanos=(budget.hard_nanos if limit == _HARD else budget.soft_nanos) or 0,
        spent_nanos=amounts.spent(budget.period, at_ms),
        reserved_nanos=amounts.reserved(for_batch=False),
        renews_at_ms=renews_at_ms(budget.period, at_ms),
        caller=account_of(budget, caller),
    )
