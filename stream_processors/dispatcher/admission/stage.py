"""Admission stage: quota, degradation and admission of request batches; each request is queued or answered."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from fairlane import metrics
from fairlane.backoff import jittered_ms
from fairlane.outcomes import Code, Decision, Degradation, Priority
from fairlane.ownership import Ownership
from fairlane.records import InferenceRequest, ModelVersion, TenantSpec
from fairlane.schema_registry import RegistryError
from fairlane_server.admission_rule import CapacityState, Prediction, WorkAhead
from fairlane_server.budgets.budgets import budget_name
from fairlane_server.conversations.turns import shortened_use
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from fairlane_server.models.rollout_arms import RESERVED
from fairlane_server.models.routes import CHAMPION, NAMED_VERSION, version_key
from stream_processors.dispatcher.admission.degradation import Degraded, Ladder, degrade, reduced_context, saved
from stream_processors.dispatcher.admission.quotas import Exceeded
from stream_processors.dispatcher.admission.retry_slots import RetrySlots
from stream_processors.dispatcher.admission.rules import Shed
from stream_processors.dispatcher.enrichment.context import shown_message_tokens
from stream_processors.dispatcher.enrichment.stage import EnrichmentStage
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.intake.validation import Rejection, charged_bytes
from stream_processors.dispatcher.output.stage import Admission, OutputStage
from stream_processors.dispatcher.queued_request import Candidate, QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class AdmissionInbox:
    """Duplicates whose first request was rejected for now, and response cache misses. ``wake`` is set for each."""

    wake: asyncio.Event
    _candidates: list[Candidate] = field(default_factory=list)

    def put(self, candidate: Candidate) -> None:
        self._candidates.append(candidate)
        self.wake.set()

    def take(self, most: int, now_ms: int) -> list[Candidate]:
        """Remove and return the oldest, admitted at ``now_ms``: they may have waited since they were classified."""
        taken = self._candidates[:most]
        del self._candidates[:most]
        return [replace(one, queued=replace(one.queued, admitted_at_ms=now_ms)) for one in taken]

    def keep(self, wanted: Callable[[Candidate], bool]) -> None:
        self._candidates = [one for one in self._candidates if wanted(one)]

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)


@dataclass(slots=True)
class AdmissionStage:
    """Checks deadline, quota and load of a batch, then queues or answers each request. Runs on the event loop.

    Raises RegistryError while the schema registry is unavailable. A single record never raises: it is dead-lettered.
    """

    ownership: Ownership
    classifier: RecordClassifier
    registry: Registry
    scheduler: Scheduler[QueuedRequest]
    enrichment: EnrichmentStage
    output: OutputStage
    ladder: Ladder = field(default_factory=Ladder)
    retry_slots: RetrySlots = field(default_factory=RetrySlots)

    async def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue each request or answer it. Requests of partitions that moved on are left to their new owner, which may
        have accepted them by now: their ids stay."""
        current = [one for one in candidates if self.ownership.is_current(one.claim)]
        if in_time := await self._in_time(current):
            await self._admit(in_time)

    def requeue(self, requeued: Sequence[Candidate]) -> None:
        """Queue work that a consumer sent back, with less context. It was admitted once and is not judged again."""
        for candidate in requeued:
            if not self.ownership.is_current(candidate.claim):
                continue
            try:
                now_ms = self.output.clock()
                now = self.registry.as_of_now(candidate.queued, now_ms)
                if isinstance(now, Rejection):
                    outputs = self.output.not_served(candidate.queued, now, now_ms)
                    self.output.transactions.submit(Settlement(candidate.claim, outputs))
                    continue
                reduced, notes = self.reduced(now, now_ms)
                self.scheduler.push(reduced)
                # Its first run is settled; the second is reserved, and not judged.
                self.output.budgets.reserve(reduced, now_ms)
                self.output.transactions.note(notes)
            except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                self._dead_letter(candidate, error)

    async def _in_time(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the requests within their deadline. Answer the others, forget their ids, and charge no quota."""
        now_ms = self.output.clock()
        late = [one.queued for one in candidates if now_ms > one.queued.deadline_at_ms]
        if not late:
            return list(candidates)
        await self.output.accepted_ids.forget([queued.seen for queued in late])
        self.output.transactions.submit_many([self.output.late(queued, now_ms) for queued in late])
        return [one for one in candidates if now_ms <= one.queued.deadline_at_ms]

    async def _admit(self, candidates: Sequence[Candidate]) -> None:
        within_quota = await self.output.charges.charge([one.queued for one in candidates])
        self.scheduler.refresh(self.output.clock())
        answered: list[Settlement] = []
        may_try_again: list[QueuedRequest] = []
        not_taken: list[QueuedRequest] = []
        gone: list[QueuedRequest] = []
        with metrics.stage_time("admission"):
            for candidate, exceeded in zip(candidates, within_quota, strict=True):
                queued = candidate.queued
                if not self.ownership.is_current(queued.claim):
                    if exceeded is None:
                        gone.append(queued)
                    continue
                try:
                    verdict = self._decide_as_of_now(queued, exceeded, self.output.clock())
                    if isinstance(verdict, Admission):
                        self.scheduler.push(verdict.queued)
                        self.output.budgets.reserve(verdict.queued, self.output.clock())
                        self.enrichment.begin(verdict.queued)
                        self.output.admit(verdict)
                        continue
                except RegistryError:
                    # The schema registry is unavailable; the record is fine.
                    raise
                except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                    self._dead_letter(candidate, error)
                    if exceeded is None:
                        not_taken.append(queued)
                    else:
                        self.output.charges.debts.settle(queued.tenant, queued.claim)
                    continue
                answered.append(Settlement(queued.claim, verdict))
                may_try_again.append(queued)
                if exceeded is None:
                    not_taken.append(queued)
        # Before the rejections go out: a sender may retry the same id as soon as it reads one.
        if may_try_again:
            await self.output.accepted_ids.forget([queued.seen for queued in may_try_again])
        await self.output.charges.refund(not_taken)
        await self.output.charges.hand_over(gone)
        if answered:
            self.output.transactions.submit_many(answered)

    def _decide_as_of_now(
        self, queued: QueuedRequest, exceeded: Exceeded | None, now_ms: int
    ) -> Admission | tuple[OutputRecord, ...]:
        # Tenants or models may have changed during the Redis round trip or the duplicate look-up.
        now = self.registry.as_of_now(queued, now_ms)
        if isinstance(now, Rejection):
            return self.output.not_served(queued, now, now_ms)
        return self.decide(now, exceeded, now_ms)

    def _dead_letter(self, candidate: Candidate, error: Exception) -> None:
        """Dead-letter a record on which our own code failed."""
        self.output.transactions.submit(Settlement(candidate.claim, self.classifier.broken(candidate.record, error)))

    def decide(
        self, queued: QueuedRequest, exceeded: Exceeded | None, now_ms: int
    ) -> Admission | tuple[OutputRecord, ...]:
        """The request as it is queued, or the outputs of its immediate rejection."""
        if exceeded is not None and (exceeded.retry_after_ms is None or not queued.is_backfill):
            return self._beyond_quota(queued, exceeded, now_ms)
        budgets = self.output.budgets.judge(queued, now_ms)
        if budgets.is_refusal:
            return self.output.beyond_budget(queued, budgets, now_ms)
        if budgets.soft is None:
            return self._decide_by_load(queued, queued, exceeded, now_ms)
        saved = self._saved(queued, now_ms) if budgets.degrade else queued
        return self._decide_by_load(queued, replace(saved, budget=budgets.soft), exceeded, now_ms)

    def _decide_by_load(
        self, sent: QueuedRequest, queued: QueuedRequest, exceeded: Exceeded | None, now_ms: int
    ) -> Admission | tuple[OutputRecord, ...]:
        """Decide about a request that was ``sent`` and is ``queued`` as its budgets allow."""
        # As it was sent: at its next try it may be degraded otherwise.
        backlog, target_part = (queued.pool, queued.tenant, queued.priority_class), 1.0
        content: int | None = None
        if not queued.is_backfill and self.retry_slots.are_outstanding(backlog):
            content = _content_of(queued.request)
            target_part = self.retry_slots.target_part(backlog, content, now_ms)
        load, prediction = self.scheduler.predict(queued)
        degraded, pressure, level = self._degrade(queued, prediction, target_part, now_ms)
        if degraded is not queued:
            load, prediction = self.scheduler.predict(degraded)
        verdict = self.scheduler.judge(degraded, load, now_ms, target_part)
        inputs = _inputs(degraded, load, prediction, self.scheduler.rank_at_most(degraded))
        if isinstance(verdict, Shed):
            if degraded.degradations:
                # Rejected even when degraded, so the reply shows the undegraded request. The audited inputs are those
                # of the degraded attempt.
                inputs["tried_steps"] = " ".join(degraded.degradations)
            retry_after_ms = verdict.retry_after_ms
            is_live = load.capacity.state is CapacityState.LIVE
            if retry_after_ms is not None and is_live and verdict.code == Code.OVERLOADED:
                content = _content_of(queued.request) if content is None else content
                service_ms = load.own_drain_ms(degraded.cost_tokens)
                retry_after_ms = ceil(self.retry_slots.refused(backlog, content, retry_after_ms, service_ms, now_ms))
            self.output.counts.shed(
                queued.tenant, queued.pool, verdict.code, now_ms, is_for_target=verdict.is_for_target
            )
            return self.output.writer.shed(sent, verdict.code, verdict.message, retry_after_ms, inputs, now_ms)
        if content is not None:
            self.retry_slots.admitted(backlog, content)
        if exceeded is not None and exceeded.retry_after_ms is not None:
            self.output.charges.owe(queued, now_ms + exceeded.retry_after_ms)
        self.output.counts.decided(degraded.tenant, Decision.ACCEPTED)
        inputs["version"] = version_key(degraded.model.model, degraded.model.version)
        inputs["arm"] = degraded.arm or CHAMPION
        if degraded.arm in RESERVED:
            inputs["sticky_key"] = self.registry.models.sticky_key(degraded.request, degraded.tenant)
        if not degraded.degradations:
            return Admission(degraded, inputs)
        felt: dict[str, object] = {"pressure": round(pressure, 3), "level": level}
        if degraded.budget is not None:
            felt["budget"] = budget_name(degraded.budget)
        return Admission(degraded, inputs, (self._note_degraded(degraded, degraded.degradations, felt, now_ms),))

    def reduced(self, queued: QueuedRequest, now_ms: int) -> tuple[QueuedRequest, tuple[OutputRecord, ...]]:
        """The requeued request with reduced context, as it is queued, and the audit of that reduction. It was admitted
        once and is not judged again. One that its consumer had no engine for keeps its context."""
        if queued.handed_back == queued.unserved:
            return queued, ()
        forbidden = self.registry.tenant(queued.tenant).forbidden_degradations
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
            cautious_cost_tokens=max(0, queued.cautious_cost_tokens - left_out),
        )
        return reduced, (self._note_degraded(reduced, made.steps, {"handed_back": queued.handed_back}, now_ms),)

    def _degrade(
        self, queued: QueuedRequest, prediction: Prediction, target_part: float, now_ms: int
    ) -> tuple[QueuedRequest, float, int]:
        """The degraded request (the same object if unchanged), its pressure, and the ladder level applied to it. At
        pressure 1 it would be rejected: for its predicted finish over the time left, or its wait over its target."""
        if queued.is_backfill:
            # Backfill has time, so it adds no pressure; it gets the level of its tenant's online requests.
            pressure, level = 0.0, self.ladder.present_level(queued.pool, queued.tenant, now_ms)
        else:
            allowed_ms = max(1, queued.deadline_at_ms - now_ms)
            target_ms = target_part * queued.latency_target_ms
            pressure = max(prediction.finish_ms / allowed_ms, prediction.queue_ms / target_ms)
            level = self.ladder.level(queued.pool, queued.tenant, pressure, now_ms)
            if level:
                level = self.ladder.felt(level, pressure)
        if not level:
            return queued, pressure, level
        return self._with_less(queued, level), pressure, level

    def _saved(self, queued: QueuedRequest, now_ms: int) -> QueuedRequest:
        """The request as a budget that is reached asks for it: by a smaller model, in a lower class."""
        spec = self.registry.tenant(queued.tenant)
        smaller, pool = self._smaller(queued, spec)
        if pool != queued.pool and self.scheduler.capacity.pool(pool, now_ms).state is not CapacityState.LIVE:
            smaller = None
        made = saved(queued.request, spec, queued.model, smaller)
        if not made.steps:
            return queued
        allowed_ms = queued.deadline_at_ms - queued.submitted_at_ms
        target_ms = self.registry.latency_target_ms(queued.tenant, made.request.priority, allowed_ms)
        return replace(self._as_made(queued, made, pool), latency_target_ms=target_ms)

    def _with_less(self, queued: QueuedRequest, level: int) -> QueuedRequest:
        """The request degraded at this level. The smaller model is used only if its pool predicts an earlier finish."""
        spec = self.registry.tenant(queued.tenant)
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
        if made.deferred:
            steps = made.steps
            if made.request.priority == Priority.LOW:
                steps = tuple(step for step in steps if step is not Degradation.DEFERRED)
            made = replace(made, request=replace(made.request, priority=Priority.LOW), steps=steps)
        return self._as_made(queued, made, pool_of_smaller) if made.steps else queued

    def _as_made(self, queued: QueuedRequest, made: Degraded, pool_of_smaller: str) -> QueuedRequest:
        """The degraded request with its new costs."""
        request = made.request
        input_bytes = charged_bytes(request.input)
        adds_context = request.retrieval is not None or request.conversation_id is not None
        expected_tokens = queued.expected_tokens if adds_context else 0
        cost = self.registry.costs.estimate(queued.tenant, made.model, input_bytes, request.parameters.max_tokens)
        return replace(
            queued,
            request=request,
            model=made.model,
            arm=queued.arm if made.model is queued.model else CHAMPION,
            pool=queued.pool if made.model is queued.model else pool_of_smaller,
            cost_tokens=cost.total + expected_tokens,
            cautious_cost_tokens=cost.cautious_total + expected_tokens,
            prompt_tokens=cost.prompt_tokens + expected_tokens,
            expected_tokens=expected_tokens,
            input_bytes=input_bytes,
            degradations=(*queued.degradations, *made.steps),
        )

    def _smaller(self, queued: QueuedRequest, spec: TenantSpec) -> tuple[ModelVersion | None, str]:
        """The smaller model this tenant may use and the pool serving it; None and the present pool if there is none."""
        # A request that names a version asks for nothing else.
        name = None if queued.arm == NAMED_VERSION else queued.model.smaller_model
        model = None if name is None else self.registry.models.champion(name)
        if model is None or (spec.models and model.model not in spec.models):
            return None, queued.pool
        pool = self.registry.pool_for(model, queued.tenant)
        return (None, queued.pool) if isinstance(pool, Rejection) else (model, pool)

    def _note_degraded(
        self, queued: QueuedRequest, steps: Sequence[str], inputs: Mapping[str, object], now_ms: int
    ) -> OutputRecord:
        """The audit record of a degradation, which is also counted."""
        self.output.counts.degraded(queued.tenant, steps)
        return self.output.writer.degraded(queued, steps, inputs, now_ms)

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
            "limit": getattr(self.registry.tenant(queued.tenant), exceeded.which),
            "cost_tokens": queued.cost_tokens,
            "submitted_at_ms": queued.submitted_at_ms,
            "deadline_at_ms": queued.deadline_at_ms,
        }
        self.output.counts.shed(queued.tenant, queued.pool, Code.QUOTA_EXCEEDED, now_ms)
        return self.output.writer.shed(queued, Code.QUOTA_EXCEEDED, message, retry_after_ms, inputs, now_ms)


def _content_of(request: InferenceRequest) -> int:
    """The same for a request that is sent again, under whatever id."""
    return hash((request.model, request.task, request.input, request.parameters, request.conversation_id))


def _inputs(queued: QueuedRequest, load: WorkAhead, prediction: Prediction, rank_at_most: int) -> dict[str, object]:
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
