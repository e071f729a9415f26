"""Apply work-feed events to the scheduler: capacity, fleet, in-flight work, actual cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.names import EVALUATION_TENANT
from fairlane.outcomes import Outcome
from fairlane.records import DispatchReport, UsageEvent
from fairlane_server.admission_rule import PoolCapacity
from stream_processors.dispatcher.budgets.gate import BudgetGate
from stream_processors.dispatcher.evaluation.stage import EvaluationStage
from stream_processors.dispatcher.feedback.work_records import (
    AgedCapacityReport,
    FeedEvent,
    PartitionsKnown,
    UsageRead,
    UsageStarted,
    apply_to_in_flight,
)
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.cost import CostModel, actual_cost, correction
from stream_processors.dispatcher.scheduling.in_flight import Reserved, SettledWork
from stream_processors.dispatcher.scheduling.scheduler import CLASS_WEIGHTS, Scheduler


@dataclass(slots=True)
class SchedulerUpdates:
    """Updates scheduler, cost model and statistics from the work feed. Runs on the event loop."""

    scheduler: Scheduler[QueuedRequest]
    costs: CostModel
    counts: TenantCounters
    response_cache: ResponseCacheStage
    budgets: BudgetGate
    evaluation: EvaluationStage
    clock: ClockMs

    def learn(self, events: Sequence[FeedEvent]) -> None:
        now_ms = self.clock()
        scheduler = self.scheduler
        for event in events:
            if isinstance(event, AgedCapacityReport):
                scheduler.capacity.report(event.report, now_ms - event.age_ms)
            elif isinstance(event, DispatchReport):
                scheduler.fleet.report(event, now_ms)
            elif isinstance(event, UsageRead | UsageStarted):
                self.budgets.learn(event, now_ms)
            else:
                if not isinstance(event, UsageEvent | PartitionsKnown):
                    self.budgets.learn(event, now_ms)
                settled = apply_to_in_flight(scheduler.in_flight, event)
                if isinstance(event, UsageEvent):
                    if event.tenant == EVALUATION_TENANT:
                        self.evaluation.learn(event)
                    scheduler.finished(event.work.topic, event.work.partition, now_ms)
                if settled is not None:
                    self.response_cache.settled(settled)
                    self._settled(settled, now_ms)

    def _settled(self, settled: SettledWork, now_ms: int) -> None:
        """Correct charge and cost model by the actual usage. Only the dispatcher that charged the tenant does so."""
        own, usage = settled.own, settled.usage
        if own is None or usage is None:
            return
        if own.tenant == EVALUATION_TENANT:
            # Nothing was charged for a copy, and what a candidate takes says nothing of the requests of tenants.
            self._count_served(own, actual_cost(usage), now_ms)
            return
        self.costs.learn(own.tenant, own.model, own.input_bytes, own.most_output_tokens, usage)
        self.scheduler.correct(own, correction(self.scheduler.charged_tokens(own), usage))
        spent = actual_cost(usage)
        if spent:
            if usage.outcome == Outcome.OK:
                self.scheduler.learn_service(own, spent, usage.engine_ms)
            self._count_served(own, spent, now_ms)

    def _count_served(self, own: Reserved, spent_tokens: int, now_ms: int) -> None:
        self.counts.recent.served(own.tenant, own.pool, spent_tokens, now_ms)
        metrics.SERVED_TOKENS.labels(tenant=self.counts.label(own.tenant), pool=own.pool).inc(spent_tokens)

    def show(self) -> None:
        """Update the gauges. Call it periodically."""
        scheduler, now_ms = self.scheduler, self.clock()
        scheduler.refresh(now_ms)
        metrics.DISPATCHERS.set(scheduler.fleet.dispatchers(now_ms))
        for pool in scheduler.capacity.pools():
            # Include pools without requests here: a missing consumer must show before the first request does.
            self._show_capacity(pool, scheduler.capacity.pool(pool, now_ms))
        for pool, queue, capacity, view, _share in scheduler.pool_views():
            self._show_capacity(pool, capacity)
            for priority_class in CLASS_WEIGHTS:
                waiting = queue.waiting_in_class(priority_class)
                metrics.WAITING_REQUESTS.labels(pool=pool, priority_class=priority_class).set(waiting.requests)
                metrics.WAITING_TOKENS.labels(pool=pool, priority_class=priority_class).set(waiting.tokens)
            metrics.IN_FLIGHT_TOKENS.labels(pool=pool).set(view.in_flight_tokens)
            metrics.WINDOW_TOKENS.labels(pool=pool).set(view.window_tokens)
            metrics.WINDOW_SHARE.labels(pool=pool).set(view.share)

    @staticmethod
    def _show_capacity(pool: str, capacity: PoolCapacity) -> None:
        metrics.POOL_CONSUMERS.labels(pool=pool).set(capacity.consumers)
        metrics.POOL_TOKENS_PER_S.labels(pool=pool).set(capacity.cost_tokens_per_s)
        metrics.POOL_LOST_SECONDS.labels(pool=pool).set(capacity.lost_for_ms / 1000)
