"""Content of a dispatcher's heartbeat: backlogs, and the outcomes of each tenant's requests in each pool. Pure."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import TypeVar

from fairlane.records import BudgetLoad, ClassLoad, DispatchReport, PoolLoad, ShedCount, TenantLoad
from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue
from stream_processors.dispatcher.scheduling.scheduler import CLASS_WEIGHTS, Scheduler

MAX_TENANTS = 100
"""Most tenants in one report: the busiest."""

ItemT = TypeVar("ItemT", bound=Schedulable)

WAITS_LAST_MS = 60_000
"""How long a wait counts."""

QUIET_AFTER_MS = 60_000
"""A tenant without outcomes for this long is forgotten, unless it has a backlog or work in flight."""

_MAX_ENTRIES = 20_000
_WAITS_KEPT = 256
_AGED_AT_ONCE = 500
"""Bounds one call when all tenants become quiet at once; the others follow a second later."""


@dataclass(slots=True)
class TenantCounts:
    """Counts of one tenant in one pool, since it was last quiet."""

    served_tokens: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    last_at_ms: int = 0
    waits: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WAITS_KEPT))
    """Time and duration of each wait, in milliseconds."""

    def wait_p99_ms(self, now_ms: int) -> float:
        """The 99th percentile of the waits of the last minute, at most 256; 0 without any."""
        waits = self.waits
        while waits and waits[0][0] <= now_ms - WAITS_LAST_MS:
            waits.popleft()
        if not waits:
            return 0.0
        # Nearest rank.
        at_least = len(waits) - -(-99 * len(waits) // 100) + 1
        return float(nlargest(at_least, (wait_ms for _, wait_ms in waits))[-1])


class TenantStats:
    """Counts of recently active tenants; ``age`` forgets the others. At most 20,000 pairs of tenant and pool; beyond it
    the least recently used one is dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], TenantCounts] = OrderedDict()
        self._served: Counter[str] = Counter()

    def served(self, tenant: str, pool: str, tokens: int, now_ms: int) -> None:
        """Count the cost of work that is done."""
        self._touch(tenant, pool, now_ms).served_tokens += tokens
        self._served[pool] += tokens

    def shed(self, tenant: str, pool: str, code: str, now_ms: int) -> None:
        self._touch(tenant, pool, now_ms).shed[code] += 1

    def dispatched(self, tenant: str, pool: str, waited_ms: int, now_ms: int) -> None:
        self._touch(tenant, pool, now_ms).waits.append((now_ms, waited_ms))

    def age(self, now_ms: int, is_busy: Callable[[str, str], bool]) -> None:
        """Forget tenants that are quiet; ``is_busy``: whether a tenant has a backlog or work in flight in a pool.
        Checks at most 500 entries: call it once a second."""
        for _ in range(min(_AGED_AT_ONCE, len(self._entries))):
            (tenant, pool), counts = next(iter(self._entries.items()))
            if counts.last_at_ms > now_ms - QUIET_AFTER_MS:
                return
            if is_busy(tenant, pool):
                self._touch(tenant, pool, now_ms)
            else:
                del self._entries[tenant, pool]

    def items(self) -> Iterator[tuple[str, str, TenantCounts]]:
        """Tenant, pool and counts; most recently used first."""
        for (tenant, pool), counts in reversed(self._entries.items()):
            yield tenant, pool, counts

    def of(self, tenant: str, pool: str) -> TenantCounts:
        """The counts; zeros for an unknown pair."""
        return self._entries.get((tenant, pool)) or TenantCounts()

    def served_in(self, pool: str) -> int:
        """Cost tokens served in this pool since the start, of all tenants."""
        return self._served[pool]

    def _touch(self, tenant: str, pool: str, now_ms: int) -> TenantCounts:
        key = (tenant, pool)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = TenantCounts()
            if len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        entry.last_at_ms = now_ms
        return entry


def pool_loads(scheduler: Scheduler[ItemT], stats: TenantStats) -> tuple[PoolLoad, ...]:
    """Per pool: backlog by class, this dispatcher's share of the window, and tokens served."""
    return tuple(
        PoolLoad(
            pool=name,
            window_tokens=round(view.window_tokens),
            share=view.share,
            # Gateways predict waits by it, in which copies for evaluation have no part.
            in_flight_tokens=scheduler.in_flight.own_tokens(name),
            classes=tuple(
                ClassLoad(priority_class, queue.backlogged_weight(priority_class), waiting.requests, waiting.tokens)
                for priority_class in CLASS_WEIGHTS
                if (waiting := queue.waiting_in_class(priority_class)).requests
            ),
            served_tokens=stats.served_in(name),
        )
        for name, queue, _capacity, view, _share in scheduler.pool_views()
    )


def tenant_loads(scheduler: Scheduler[ItemT], stats: TenantStats, now_ms: int) -> tuple[TenantLoad, ...]:
    """The busiest tenants: those with the largest backlog, then the most recently active. Drops quiet tenants from
    ``stats``."""
    queues = {pool: queue for pool, queue, _capacity, _view, _share in scheduler.pool_views()}

    def is_busy(tenant: str, pool: str) -> bool:
        queue = queues.get(pool)
        is_waiting = queue is not None and queue.is_waiting(tenant)
        return is_waiting or scheduler.in_flight.own_tenant_tokens(tenant, pool) > 0

    stats.age(now_ms, is_busy)
    waiting = (
        (tokens, tenant, pool) for pool, queue in queues.items() for tenant, tokens in queue.busiest(MAX_TENANTS)
    )
    busiest = dict.fromkeys((tenant, pool) for _tokens, tenant, pool in nlargest(MAX_TENANTS, waiting))
    for tenant, pool, _counts in islice(stats.items(), MAX_TENANTS):
        busiest.setdefault((tenant, pool))
    return tuple(
        _tenant_load(scheduler, stats, queues.get(pool), tenant, pool, now_ms)
        for tenant, pool in islice(busiest, MAX_TENANTS)
    )


def report(
    scheduler: Scheduler[ItemT],
    stats: TenantStats,
    instance_id: str,
    started_at_ms: int,
    now_ms: int,
    *,
    with_tenants: bool,
    budgets: tuple[BudgetLoad, ...] = (),
) -> DispatchReport:
    """The heartbeat of this dispatcher. ``budgets`` are its reservations, reported as often as tenants."""
    tenants = tenant_loads(scheduler, stats, now_ms) if with_tenants else ()
    pools = pool_loads(scheduler, stats)
    return DispatchReport(
        instance_id, started_at_ms, now_ms, draining=False, pools=pools, tenants=tenants, budgets=budgets
    )


def _tenant_load(
    scheduler: Scheduler[ItemT], stats: TenantStats, queue: FairQueue[ItemT] | None, tenant: str, pool: str, now_ms: int
) -> TenantLoad:
    waiting = [] if queue is None else [queue.waiting(tenant, name) for name in CLASS_WEIGHTS]
    counts = stats.of(tenant, pool)
    return TenantLoad(
        tenant=tenant,
        pool=pool,
        waiting_requests=sum(one.requests for one in waiting),
        waiting_tokens=sum(one.tokens for one in waiting),
        in_flight_tokens=scheduler.in_flight.own_tenant_tokens(tenant, pool),
        served_tokens=counts.served_tokens,
        entitled_share=scheduler.entitled_share(tenant, pool),
        wait_p99_ms=counts.wait_p99_ms(now_ms),
        shed=tuple(ShedCount(code, count) for code, count in sorted(counts.shed.items())),
    )
