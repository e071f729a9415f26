"""Decide whether a valid request is admitted, and how degraded: quota, degradation ladder, admission."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fairlane.backoff import jittered_ms
from fairlane.outcomes import Code, Decision, Degradation, Priority
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.conversations.turns import shortened_use
from fairlane_server.kafka.transactions import OutputRecord
from stream_processors.dispatcher.admission.backfill_debts import BackfillDebts
from stream_processors.dispatcher.admission.degradation import Ladder, degrade, reduced_context
from stream_processors.dispatcher.admission.local_quotas import Quotas
from stream_processors.dispatcher.admission.quotas import Ask, Exceeded, buckets_of, has_quotas
from stream_processors.dispatcher.admission.rules import LEAST_RETRY_MS, Load, Prediction, Shed
from stream_processors.dispatcher.enrichment.history_room import shown_message_tokens
from stream_processors.dispatcher.intake.pools import owners_of_pools, pool_for
from stream_processors.dispatcher.intake.validation import Rejection, charged_bytes
from stream_processors.dispatcher.output.decision_records import DecisionWriter, Inputs
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.output.tenant_stats import TenantStats
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.capacity import CapacityState
from stream_processors.dispatcher.scheduling.cost import CostModel
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

_MAX_DEBTS_PER_PAYMENT = 64
"""Debts of one tenant per quota request."""

_PAID_EVERY_MS = 200
"""Longest interval between payments. Shorter if a bucket would overflow: tokens beyond its capacity are lost."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admitted request, the inputs of that decision, and the audit records of its degradation."""

    queued: QueuedRequest
    inputs: Inputs
    degraded: tuple[OutputRecord, ...] = ()


@dataclass(slots=True)
class AdmissionDecision:
    """Combines quota, degradation and admission into one decision per request."""

    scheduler: Scheduler[QueuedRequest]
    ladder: Ladder
    costs: CostModel
    quotas: Quotas
    writer: DecisionWriter
    counts: TenantCounters
    stats: TenantStats
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    models: Mapping[str, ModelVersion] = field(default_factory=dict)
    debts: BackfillDebts = field(default_factory=BackfillDebts)
    """Backfill admitted beyond quotas; backfill of these tenants is paused."""
    _pool_owners: Mapping[str, str] = field(default_factory=dict)

    def set_registry(self, tenants: Mapping[str, TenantSpec], models: Mapping[str, ModelVersion]) -> None:
        if tenants is not self.tenants:
            self._pool_owners = owners_of_pools(tenants)
        self.tenants, self.models = tenants, models

    async def within_quota(self, fresh: Sequence[QueuedRequest]) -> list[Exceeded | None]:
        """Charge quotas. Returns per request the quota it exceeds, or None when it was charged."""
        if not any(has_quotas(self._spec(queued.tenant)) for queued in fresh):
            return [None] * len(fresh)
        return await self.quotas.take([self._ask(queued) for queued in fresh])

    async def give_back(self, shed: Sequence[QueuedRequest]) -> None:
        """Refund the quotas of requests that are not dispatched after all; drop their debts."""
        if asks := self._paid(shed):
            await self.quotas.give_back(asks)

    async def hand_over(self, gone: Sequence[QueuedRequest]) -> None:
        """Release the quota grants of requests whose partitions were revoked: the new owner decides again."""
        if asks := self._paid(gone):
            await self.quotas.hand_over(asks)

    async def pay_debts(self, now_ms: int) -> bool:
        """Pay debts as far as the quotas grant it now. Returns whether any tenant became free of debt."""
        before = self.debts.tenants()
        while due := list(self.debts.due(now_ms, _MAX_DEBTS_PER_PAYMENT)):
            asks = [replace(ask, spec=self._spec(ask.tenant)) for _, ask in due]
            later_ms: dict[str, int] = {}
            moved_on: list[Ask] = []
            for (claim, _), ask, exceeded in zip(due, asks, await self.quotas.take(asks), strict=True):
                # A quota lowered below the request's size can never be paid: drop the debt.
                if exceeded is not None and exceeded.retry_after_ms is not None:
                    wait_ms = max(exceeded.retry_after_ms, _pace_ms(ask.spec))
                    later_ms.setdefault(ask.tenant, now_ms + wait_ms)
                elif not self.debts.settle(ask.tenant, claim) and exceeded is None:
                    moved_on.append(ask)
            await self.quotas.give_back(moved_on)
            for tenant, due_at_ms in later_ms.items():
                self.debts.postpone(tenant, due_at_ms)
        return bool(before - self.debts.tenants())

    def admit(
        self, queued: QueuedRequest, exceeded: Exceeded | None, now_ms: int
    ) -> Admitted | tuple[OutputRecord, ...]:
        """The request as it is queued, or the outputs of its immediate rejection."""
        if exceeded is not None and (exceeded.retry_after_ms is None or not queued.is_backfill):
            return self._beyond_quota(queued, exceeded, now_ms)
        load, prediction = self.scheduler.predict(queued)
        degraded, pressure, level = self._degrade(queued, prediction, now_ms)
        if degraded is not queued:
            load, prediction = self.scheduler.predict(degraded)
        verdict = self.scheduler.judge(degraded, load, now_ms)
        inputs = _inputs(degraded, load, prediction, self.scheduler.rank_at_most(degraded))
        if isinstance(verdict, Shed):
            if degraded is not queued:
                # Rejected even when degraded, so the reply shows the undegraded request. The audited inputs are those
                # of the degraded attempt.
                inputs["tried_steps"] = " ".join(degraded.degradations)
            return self._shed(queued, verdict.code, verdict.message, verdict.retry_after_ms, inputs, now_ms)
        if exceeded is not None and exceeded.retry_after_ms is not None:
            self.debts.owe(queued.claim, self._ask(queued), now_ms + exceeded.retry_after_ms)
        self.counts.decided(degraded.tenant, Decision.ACCEPTED)
        if degraded is queued:
            return Admitted(degraded, inputs)
        felt = {"pressure": round(pressure, 3), "level": level}
        return Admitted(degraded, inputs, (self._note_degraded(degraded, degraded.degradations, felt, now_ms),))

    def take_back(self, queued: QueuedRequest, now_ms: int) -> tuple[QueuedRequest, tuple[OutputRecord, ...]]:
        """The requeued request with reduced context, as it is queued, and the audit of that reduction. It was admitted
        once and is not judged again."""
        forbidden = self._spec(queued.tenant).forbidden_degradations
        made = reduced_context(queued.request, queued.passages, forbidden, queued.history)
        if not made.steps:
            return queued, ()
        steps = tuple(dict.fromkeys((*queued.degradations, *made.steps)))
        left_out = sum(map(shown_message_tokens, queued.history[: len(queued.history) - len(made.history)]))
        reduced = replace(
            queued,
            request=made.request,
            passages=made.passages,
            history=made.history,
            history_use=shortened_use(queued.history_use, queued.history, made.history),
            degradations=steps,
            prompt_tokens=max(0, queued.prompt_tokens - left_out),
            cost_tokens=max(0, queued.cost_tokens - left_out),
        )
        return reduced, (self._note_degraded(reduced, made.steps, {"handed_back": queued.handed_back}, now_ms),)

    def retry_after_ms(self, queued: QueuedRequest, now_ms: int) -> int:
        """Retry hint of a late request: when it would be admitted if sent again now."""
        load, _ = self.scheduler.predict(queued)
        allowed_ms = queued.deadline_at_ms - queued.submitted_at_ms
        again = replace(queued, submitted_at_ms=now_ms, deadline_at_ms=now_ms + allowed_ms)
        verdict = self.scheduler.judge(again, load, now_ms)
        if isinstance(verdict, Shed):
            return verdict.retry_after_ms
        return jittered_ms(LEAST_RETRY_MS, self.scheduler.policy.admission.jitter, queued.request_id)

    def _degrade(self, queued: QueuedRequest, prediction: Prediction, now_ms: int) -> tuple[QueuedRequest, float, int]:
        """The degraded request (the same object if unchanged), its pressure (predicted finish time over time left), and
        the ladder level applied to it."""
        if queued.is_backfill:
            # Backfill has time, so it adds no pressure; it gets the level of its tenant's online requests.
            pressure, level = 0.0, self.ladder.present_level(queued.pool, queued.tenant, now_ms)
        else:
            allowed_ms = max(1, queued.deadline_at_ms - now_ms)
            pressure = prediction.finish_ms / allowed_ms
            level = self.ladder.level(queued.pool, queued.tenant, pressure, now_ms)
            if level:
                level = self.ladder.felt(level, pressure)
        if not level:
            return queued, pressure, level
        return self._with_less(queued, level), pressure, level

    def _with_less(self, queued: QueuedRequest, level: int) -> QueuedRequest:
        """The request degraded at this level. The smaller model is used only if its pool predicts an earlier finish."""
        spec = self._spec(queued.tenant)
        smaller, pool = self._smaller(queued, spec)
        degraded = self._reshaped(queued, level, spec, smaller, pool)
        if degraded.pool == queued.pool:
            return degraded
        load, there = self.scheduler.predict(degraded)
        stays = self._reshaped(queued, level, spec, None, queued.pool)
        # A pool without live consumers has no measured rate, so its prediction is no reason to switch.
        if load.capacity.state is CapacityState.LIVE and there.finish_ms < self.scheduler.predict(stays)[1].finish_ms:
            return degraded
        return stays

    def _reshaped(
        self, queued: QueuedRequest, level: int, spec: TenantSpec, smaller: ModelVersion | None, pool_of_smaller: str
    ) -> QueuedRequest:
        made = degrade(
            queued.request,
            level,
            spec.forbidden_degradations,
            queued.model,
            smaller,
            backfill=queued.is_backfill,
        )
        request, steps = made.request, list(made.steps)
        if made.deferred:
            if request.priority == Priority.LOW:
                steps.remove(Degradation.DEFERRED)
            request = replace(request, priority=Priority.LOW)
        if not steps:
            return queued
        input_bytes = charged_bytes(request.input)
        adds_context = request.retrieval is not None or request.conversation_id is not None
        expected_tokens = queued.expected_tokens if adds_context else 0
        cost = self.costs.estimate(queued.tenant, made.model, input_bytes, request.parameters.max_tokens)
        return replace(
            queued,
            request=request,
            model=made.model,
            pool=queued.pool if made.model is queued.model else pool_of_smaller,
            cost_tokens=cost.total + expected_tokens,
            prompt_tokens=cost.prompt_tokens + expected_tokens,
            expected_tokens=expected_tokens,
            input_bytes=input_bytes,
            degradations=(*queued.degradations, *steps),
        )

    def _smaller(self, queued: QueuedRequest, spec: TenantSpec) -> tuple[ModelVersion | None, str]:
        """The smaller model this tenant may use and the pool serving it; None and the present pool if there is none."""
        name = queued.model.smaller_model
        model = None if name is None else self.models.get(name)
        if model is None or (spec.models and model.model not in spec.models):
            return None, queued.pool
        pool = pool_for(model, queued.tenant, spec.pool, self._pool_owners)
        return (None, queued.pool) if isinstance(pool, Rejection) else (model, pool)

    def _paid(self, unsent: Sequence[QueuedRequest]) -> list[Ask]:
        """The quota charges of these requests. Settles their debts instead where they owed; requeued work was never
        charged."""
        asked = [queued for queued in unsent if not queued.handed_back]
        paid = [queued for queued in asked if not self.debts.settle(queued.tenant, queued.claim)]
        return [self._ask(queued) for queued in paid if has_quotas(self._spec(queued.tenant))]

    def _ask(self, queued: QueuedRequest) -> Ask:
        spec = self._spec(queued.tenant)
        return Ask(queued.tenant, spec, queued.quota_tokens, queued.source, queued.deadline_at_ms)

    def _spec(self, tenant: str) -> TenantSpec:
        return self.tenants.get(tenant) or TenantSpec(tenant)

    def _note_degraded(
        self, queued: QueuedRequest, steps: Sequence[str], inputs: Mapping[str, object], now_ms: int
    ) -> OutputRecord:
        """The audit record of a degradation, which is also counted."""
        self.counts.degraded(queued.tenant, steps)
        return self.writer.degraded(queued, steps, inputs, now_ms)

    def _beyond_quota(self, queued: QueuedRequest, exceeded: Exceeded, now_ms: int) -> tuple[OutputRecord, ...]:
        retry_after_ms = exceeded.retry_after_ms
        if retry_after_ms is None:
            message = f"the request alone is more than the quota {exceeded.which} of {queued.tenant} allows"
        else:
            message = f"the quota {exceeded.which} of {queued.tenant} is used up"
            # No upper bound, unlike in admission: a daily quota does not refill within minutes.
            retry_after_ms = jittered_ms(retry_after_ms, self.scheduler.policy.admission.jitter, queued.request_id)
        inputs = {
            "pool": queued.pool,
            "priority_class": queued.priority_class,
            "quota": exceeded.which,
            # A quota is named like the field of TenantSpec that sets it.
            "limit": getattr(self._spec(queued.tenant), exceeded.which),
            "cost_tokens": queued.cost_tokens,
            "submitted_at_ms": queued.submitted_at_ms,
            "deadline_at_ms": queued.deadline_at_ms,
        }
        return self._shed(queued, Code.QUOTA_EXCEEDED, message, retry_after_ms, inputs, now_ms)

    def _shed(
        self,
        queued: QueuedRequest,
        code: Code,
        message: str,
        retry_after_ms: int | None,
        inputs: Mapping[str, object],
        now_ms: int,
    ) -> tuple[OutputRecord, ...]:
        self.counts.decided(queued.tenant, Decision.REFUSED, code)
        self.stats.shed(queued.tenant, queued.pool, code, now_ms)
        return self.writer.shed(queued, code, message, retry_after_ms, inputs, now_ms)


def _pace_ms(spec: TenantSpec) -> int:
    """Interval between payments: half the fill time of the fastest bucket, at most ``_PAID_EVERY_MS``. Each payment
    costs a round trip and collects at most one bucket."""
    full_ms = min((bucket.capacity / bucket.per_ms for bucket in buckets_of(spec) if bucket.per_ms > 0), default=0.0)
    return round(min(full_ms / 2, _PAID_EVERY_MS))


def _inputs(queued: QueuedRequest, load: Load, prediction: Prediction, rank_at_most: int) -> dict[str, object]:
    return {
        "pool": queued.pool,
        "priority_class": queued.priority_class,
        "rank_at_most": rank_at_most,
        "predicted_wait_ms": _whole(prediction.wait_ms),
        "predicted_service_ms": _whole(prediction.service_ms),
        "cost_tokens": queued.cost_tokens,
        "in_flight_tokens": load.in_flight_tokens,
        "waiting_tokens": load.waiting_tokens,
        "own_share": round(load.own_share, 4),
        "capacity": load.capacity.state,
        "consumers": load.capacity.consumers,
        "capacity_tokens_per_s": round(load.capacity.cost_tokens_per_s),
        "submitted_at_ms": queued.submitted_at_ms,
        "deadline_at_ms": queued.deadline_at_ms,
    }


def _whole(value: float) -> object:
    return round(value) if value < 1e15 else "unknown"
