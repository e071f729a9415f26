"""The budgets as the stages of the dispatcher use them: estimates in money, verdicts, reservations, metrics."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.outcomes import BudgetScope
from fairlane.records import BudgetLoad, TenantSpec
from fairlane_server.budgets.budgets import amounts_of
from fairlane_server.costs.price_book import PriceBook
from stream_processors.dispatcher.budgets.estimate import estimated_nanos
from stream_processors.dispatcher.budgets.ledger import WITHIN, BudgetLedger, Judgement
from stream_processors.dispatcher.feedback.work_records import (
    PartitionRecreated,
    PoolCommitted,
    UsageRead,
    UsageStarted,
    WorkSeen,
)
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

_MOST_LOADS = 200
_SHOWN_EVERY_MS = 5_000
_CALLER = "caller"
"""Label of all budgets of single callers, whose names are nobody's business."""

BudgetEvent = UsageStarted | UsageRead | WorkSeen | PoolCommitted | PartitionRecreated


@dataclass(slots=True)
class BudgetGate:
    """Runs on the event loop. For a tenant without budgets every call costs one look-up."""

    scheduler: Scheduler[QueuedRequest]
    prices: Callable[[], PriceBook]
    ledger: BudgetLedger = field(default_factory=BudgetLedger)
    _shown: set[tuple[str, str, str, str]] = field(default_factory=set)
    _show_at_ms: int = 0

    def set_tenants(self, tenants: Mapping[str, TenantSpec], now_ms: int) -> None:
        self.ledger.set_budgets({name: spec.budgets for name, spec in tenants.items() if spec.budgets}, now_ms)

    def judge(self, queued: QueuedRequest, now_ms: int) -> Judgement:
        """Whether a request may be admitted."""
        if not self.ledger.has_budgets(queued.tenant):
            return WITHIN
        nanos = self._estimate(queued, now_ms)
        caller = queued.request.requested_by
        return self.ledger.judge(queued.tenant, caller, nanos, now_ms, is_batch=queued.is_backfill)

    def reserve(self, queued: QueuedRequest, now_ms: int) -> None:
        """Reserve the estimate of an admitted request."""
        if self.ledger.has_budgets(queued.tenant):
            self._reserve(queued, self._estimate(queued, now_ms), now_ms)

    def admit_cached(self, queued: QueuedRequest, nanos: int, now_ms: int) -> Judgement:
        """Judge a request that may be answered from the cache at this price, which is then reserved. A free answer is
        never refused."""
        if not self.ledger.has_budgets(queued.tenant):
            return WITHIN
        caller = queued.request.requested_by
        verdict = self.ledger.judge(queued.tenant, caller, nanos, now_ms, is_batch=queued.is_backfill)
        if nanos <= 0:
            return Judgement(soft=verdict.soft)
        if not verdict.is_refusal:
            self._reserve(queued, nanos, now_ms)
            self.ledger.reservations.sent(queued.settles, now_ms)
        return verdict

    def dispatch(self, queued: QueuedRequest, now_ms: int) -> tuple[Judgement, int | None]:
        """Judge a request whose turn has come, by its present estimate. If it may be dispatched, it counts as in flight
        from now on; then also its estimate, None without budgets."""
        if not self.ledger.has_budgets(queued.tenant):
            return WITHIN, None
        self.reserve(queued, now_ms)
        verdict = self.ledger.judge_dispatch(queued.settles, queued.request.requested_by, now_ms)
        if verdict.is_refusal:
            return verdict, None
        return verdict, self.ledger.reservations.sent(queued.settles, now_ms)

    def release(self, ended: Iterable[QueuedRequest]) -> None:
        """Release the reservations of requests that ended without running, or that another dispatcher has now."""
        for queued in ended:
            self.ledger.reservations.release(queued.settles)

    def release_all(self) -> None:
        """Release all reservations but those of work that was read back: no transaction of this process commits now."""
        self.ledger.reservations.release_all()

    def learn(self, event: BudgetEvent, now_ms: int) -> None:
        """Apply an event of the work feed."""
        reservations = self.ledger.reservations
        match event:
            case UsageStarted():
                self.ledger.started(event.partition, event.offset)
            case UsageRead():
                self.ledger.read(event.records, now_ms)
            case WorkSeen(work, seen):
                if seen.reserved_nanos is not None:
                    caller, is_batch = seen.requested_by, seen.is_batch
                    nanos = seen.reserved_nanos
                    self.ledger.seen(work, seen.source, seen.tenant, caller, nanos, now_ms, is_batch=is_batch)
            case PoolCommitted():
                below = event.point.offset
                reservations.committed(
                    event.topic, event.partition, lambda offset: offset < below or offset in event, now_ms
                )
            case PartitionRecreated():
                reservations.recreated(event.topic, event.partition)

    def loads(self) -> tuple[BudgetLoad, ...]:
        """The reservations, for the heartbeat."""
        return self.ledger.loads(_MOST_LOADS)

    def upkeep(self, now_ms: int) -> None:
        """Expire reservations and update the gauges, every 5 seconds. Call it periodically."""
        if now_ms < self._show_at_ms:
            return
        self._show_at_ms = now_ms + _SHOWN_EVERY_MS
        metrics.BUDGET_RESERVATIONS_LOST.inc(self.ledger.expire(now_ms))
        metrics.BUDGETS_UNKNOWN.set(len(self.ledger.unknown()))
        parts: dict[tuple[str, str, str, str], float] = {}
        for tenant, budget, spent in self.ledger.parts(now_ms):
            of = budget.of if budget.of in tuple(BudgetScope) else _CALLER
            for limit, nanos in amounts_of(budget):
                labels = tenant, of, budget.period, limit
                part = spent / nanos if nanos else 1.0
                parts[labels] = max(part, parts.get(labels, 0.0))
        self._shown = metrics.show(metrics.BUDGET_SPENT_RATIO, parts, self._shown)

    def _reserve(self, queued: QueuedRequest, nanos: int, now_ms: int) -> None:
        caller = queued.request.requested_by
        self.ledger.reserve(queued.settles, queued.tenant, caller, nanos, now_ms, is_batch=queued.is_backfill)

    def _estimate(self, queued: QueuedRequest, now_ms: int) -> int:
        return estimated_nanos(
            self.prices(),
            queued,
            self.ledger.currency(queued.tenant),
            lambda: self.scheduler.predict(queued)[1].service_ms,
            now_ms,
        )
