"""Content of a dispatcher's heartbeat. Pure: state in, a report out."""

from heapq import nlargest
from itertools import islice
from typing import TypeVar

from fairlane.records import ClassLoad, DispatchReport, PoolLoad, ShedCount, TenantLoad
from stream_processors.dispatcher.output.tenant_stats import TenantStats
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue
from stream_processors.dispatcher.scheduling.scheduler import CLASS_WEIGHTS, Scheduler
from stream_processors.dispatcher.scheduling.turns import Schedulable

MAX_TENANTS = 100
"""Most tenants in one report: the busiest."""

ItemT = TypeVar("ItemT", bound=Schedulable)


def pool_loads(scheduler: Scheduler[ItemT], stats: TenantStats) -> tuple[PoolLoad, ...]:
    """Per pool: backlog by class, this dispatcher's share of the window, and tokens served."""
    return tuple(
        PoolLoad(
            pool=name,
            window_tokens=round(view.window_tokens),
            share=view.share,
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
        return _waits(queues.get(pool), tenant) or scheduler.in_flight.own_tenant_tokens(tenant, pool) > 0

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
) -> DispatchReport:
    """The heartbeat of this dispatcher."""
    tenants = tenant_loads(scheduler, stats, now_ms) if with_tenants else ()
    pools = pool_loads(scheduler, stats)
    return DispatchReport(instance_id, started_at_ms, now_ms, draining=False, pools=pools, tenants=tenants)


def _waits(queue: FairQueue[ItemT] | None, tenant: str) -> bool:
    return queue is not None and any(queue.waiting(tenant, name).requests for name in CLASS_WEIGHTS)


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
