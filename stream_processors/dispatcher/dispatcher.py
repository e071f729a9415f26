"""The dispatcher's pipeline: every record passes these stages in order, and leaves as settlements to be committed.

- ``intake``: decoded and validated, or refused;
- ``deduplication``: a request id that was accepted before leaves the batch;
- ``response_cache``: a request that may be answered from the cache leaves the batch for its look-up;
- ``admission``: queued in the ``scheduler``, degraded if need be, or rejected;
- ``scheduler``: waits for its turn in the fair queue, while ``enrichment`` looks up its context;
- ``dispatch``: output; its work item is written to the pool's priority topic, and a copy of it if a shadow samples it.

Copies for evaluation leave the batch behind intake, and wait in ``evaluation`` until nothing else waits for their pool.

Requests that left the batch return later: duplicates and cache misses through the inbox of admission, others through
``ready`` of enrichment. ``cancellation`` finds a request in whichever stage it waits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.names import backfill_topic
from fairlane.outcomes import Decision
from fairlane.ownership import Ownership, PartitionId
from fairlane.records import TenantSpec
from fairlane_server.kafka.transactions import Settlement
from fairlane_server.models.catalog import ModelCatalog
from stream_processors.dispatcher.admission.stage import AdmissionInbox, AdmissionStage
from stream_processors.dispatcher.cancellation import CancellationService
from stream_processors.dispatcher.deduplication.stage import DeduplicationStage
from stream_processors.dispatcher.enrichment.context import refusal_of
from stream_processors.dispatcher.enrichment.stage import EnrichmentStage
from stream_processors.dispatcher.evaluation.stage import EvaluationStage
from stream_processors.dispatcher.feedback.scheduler_updates import SchedulerUpdates
from stream_processors.dispatcher.intake.stage import IntakeStage
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.loaded_versions import LoadedVersions
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, Turn

_MAX_BATCH = 512
_LONGEST_WAIT_S = 0.05
"""How long arrived records wait at most for the transaction before."""


def _nothing() -> None: ...


def _ignore(_pool: str, _priority_class: str) -> None: ...


@dataclass(slots=True)
class Dispatcher:
    """Everything runs on the event loop. No method raises because of a single record."""

    ownership: Ownership
    registry: Registry
    intake: IntakeStage
    deduplication: DeduplicationStage
    response_cache: ResponseCacheStage
    inbox: AdmissionInbox
    admission: AdmissionStage
    scheduler: Scheduler[QueuedRequest]
    enrichment: EnrichmentStage
    output: OutputStage
    evaluation: EvaluationStage
    cancellation: CancellationService
    updates: SchedulerUpdates
    clock: ClockMs
    wake: asyncio.Event
    """Set when ``run`` has something to decide or to send."""
    deliverable: asyncio.Event
    """Set when a request's enrichment has ended, or a cache hit can be answered."""
    loaded_versions: LoadedVersions = field(default_factory=LoadedVersions)
    on_backlog: Callable[[str, str], None] = _ignore
    """Called with each pool and class that has a backlog."""
    on_backfill: Callable[[], None] = _nothing
    """Called when backfill was decided or a tenant's debt was paid: partitions may have to be paused or resumed."""
    _payday: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    """Runs while arrived records wait for a commit."""
    _next_turn: asyncio.TimerHandle | None = None
    """Runs until a consumer is about to be done with what it has."""

    def set_registry(self, tenants: Mapping[str, TenantSpec], models: ModelCatalog, parts: Mapping[str, float]) -> None:
        """Set the tenants and models; ``parts`` as in ``Scheduler.set_tenants``. Queued requests move to the pool that
        serves them now, or are rejected if none does."""
        reassigns = self.registry.replace(tenants, models)
        self.scheduler.set_tenants(tenants, parts)
        self.output.budgets.set_tenants(tenants, self.clock())
        if reassigns:
            self._reassign()

    def follow_loaded(self) -> None:
        """Note which versions consumers have loaded. Queued requests whose version none has are routed again when one
        has the version that they would get now."""
        is_changed = self.loaded_versions.follow(self.scheduler.capacity.loaded(self.clock()), self.clock())
        self.registry.loaded = self.loaded_versions.by_pool
        if is_changed:
            self._reassign()

    def _reassign(self) -> None:
        now_ms = self.clock()
        self.evaluation.reassign(now_ms)
        for queued, refusal in self.registry.reassign(self.scheduler, now_ms):
            self.output.refuse(queued, refusal, now_ms)
        if self.output.is_pending:
            self.wake.set()

    async def run(self) -> None:
        """Decide arrived records batch by batch.

        Under load a batch is what arrived during a transaction: decided earlier, it would wait for the end of that
        transaction as well, and each batch costs a Redis round trip. A request that arrives alone never waits.
        """
        while True:
            await self.wake.wait()
            self.wake.clear()
            while (self.intake.is_ready() or self.inbox) and not self._has_to_wait():
                await self._decide_batch()
            await self.output.send()
            await self.pay_debts()

    def _has_to_wait(self) -> bool:
        """Whether a commit is awaited before the next batch; ``wake`` is set when it may be decided."""
        timer = self._timer
        if not self.output.transactions.has_waiting or len(self.intake.buffer) >= _MAX_BATCH:
            if timer is not None:
                timer.cancel()
                self._timer = None
            return False
        loop = asyncio.get_running_loop()
        if timer is None:
            self._timer = loop.call_later(_LONGEST_WAIT_S, self.wake.set)
        elif loop.time() >= timer.when():
            self._timer = None
            return False
        return True

    async def _decide_batch(self) -> None:
        batch = self.intake.take(_MAX_BATCH)
        fresh = await self.deduplication.submit(batch.fresh)
        candidates = self.response_cache.submit(fresh)
        candidates += self.inbox.take(_MAX_BATCH, self.clock())
        await self.admission.submit(candidates)
        self.admission.requeue(batch.requeued)
        self.evaluation.submit(batch.copies)
        await self.cancellation.submit(batch.cancels)
        if self.intake.schemas:
            self.intake.buffer.on_change()
        if batch.has_backfill:
            self.on_backfill()
        # Before the audit, so that a request dispatched at once has one audit event.
        self.dispatch()
        self.output.write_admissions()
        await self.output.send()
        await self.pay_debts()
        for pool, priority_class in self.scheduler.backlogs():
            self.on_backlog(pool, priority_class)
        self.output.counts.flush()

    async def deliver(self) -> None:
        """Dispatch enriched requests and answer cache hits at once, as a task besides ``run``, which may be waiting for
        Redis."""
        while True:
            await self.deliverable.wait()
            self.deliverable.clear()
            self.dispatch()

    @metrics.stage_time("dispatch")
    def dispatch(self) -> None:
        """Answer cache hits; dispatch enriched requests, requests whose turn has come, in queue order, and copies for
        evaluation with what is left. The oldest request of a partition that is about to be paused goes first among its
        own tenant's, never before other tenants'."""
        now_ms = self.clock()
        self.response_cache.answer_hits()
        settlements = [self._dispatched(turn, enriched, now_ms) for turn, enriched in self.enrichment.ready()]
        late: list[QueuedRequest] = []
        for turn in self.scheduler.turns(now_ms, self.ownership.escalated()):
            if turn.is_late:
                late.append(turn.item)
                continue
            enriched = self.enrichment.submit(turn)
            if enriched is not None:
                settlements.append(self._dispatched(turn, enriched, now_ms))
        settlements += [self._dispatched(turn, turn.item, now_ms) for turn in self.evaluation.turns(now_ms)]
        if sent := [settlement for settlement in settlements if settlement is not None]:
            self.output.transactions.submit_many(sent)
        self._answer_late(late, now_ms)
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        due_ms = self.scheduler.next_turn_ms(now_ms)
        if due_ms is not None:
            self._next_turn = asyncio.get_running_loop().call_later(due_ms / 1_000, self.deliverable.set)

    def _dispatched(self, turn: Turn[QueuedRequest], queued: QueuedRequest, now_ms: int) -> Settlement | None:
        """The settlement with the work item; None if the enriched request is rejected."""
        claim = queued.claim
        self._correct_cost(turn.item, queued)
        refusal = refusal_of(queued)
        if refusal is not None:
            self.enrichment.release(claim)
            self.scheduler.refund(queued)
            self.output.refuse(queued, refusal, now_ms)
            self.wake.set()
            return None
        if queued.passages or queued.history:
            source = claim.coordinate
            texts = (*(one.text for one in queued.passages), *(said.content for said in queued.history))
            self.scheduler.in_flight.add_input(source, sum(len(text.encode(errors="replace")) for text in texts))
        judgement, reserved_nanos = self.output.budgets.dispatch(queued, now_ms)
        if judgement.is_refusal:
            self.enrichment.release(claim)
            self.scheduler.refund(queued)
            self.output.refuse_beyond_budget(queued, judgement, now_ms)
            self.wake.set()
            return None
        self.response_cache.sent(claim)
        waited_ms = now_ms - queued.submitted_at_ms
        if queued.evaluation is None:
            self.output.counts.dispatched(queued.tenant, queued.pool, queued.priority_class, waited_ms, now_ms)
        else:
            self.output.counts.decided(queued.tenant, Decision.DISPATCHED)
        admission_inputs, degraded = self.output.take_admission(claim)
        turn, sampled = replace(turn, item=queued), self.evaluation.sample(queued, now_ms)
        outputs = self.output.writer.dispatched(turn, now_ms, admission_inputs, reserved_nanos, sampled)
        return Settlement(claim, (*outputs, *degraded))

    def _correct_cost(self, before: QueuedRequest, enriched: QueuedRequest) -> None:
        """Correct the cost of a request that was enriched, and count its new degradations."""
        if enriched is before:
            return
        self.scheduler.change_cost(before, enriched)
        found_tokens = enriched.prompt_tokens - before.prompt_tokens + before.expected_tokens
        self.intake.classifier.context.learn(enriched.tenant, enriched.request, found_tokens)
        steps = [step for step in enriched.degradations if step not in before.degradations]
        if steps:
            self.output.counts.degraded(enriched.tenant, steps)

    def _answer_late(self, late: Sequence[QueuedRequest], now_ms: int) -> None:
        self.output.answer_late(late, now_ms)
        if self.output.is_pending:
            self.wake.set()

    def sweep(self) -> None:
        """Answer queued requests that cannot finish in time, and drop obsolete look-ups. Call it periodically."""
        now_ms = self.clock()
        self._answer_late(self.scheduler.take_late(now_ms), now_ms)
        self.evaluation.sweep(now_ms)
        self.admission.retry_slots.expire(now_ms)
        self.enrichment.keep(self.scheduler.holds)
        self.response_cache.sweep()
        self.output.budgets.upkeep(now_ms)
        self.output.counts.flush()

    async def pay_debts(self) -> None:
        """Pay the debts of backfill as far as quotas grant it now, and schedule the next payment."""
        if await self.output.charges.pay_debts(self.clock()):
            self.on_backfill()
        if self._payday is not None:
            self._payday.cancel()
            self._payday = None
        due_at_ms = self.output.charges.debts.next_due_ms()
        if due_at_ms is not None:
            delay_s = max(1, due_at_ms - self.clock()) / 1_000
            self._payday = asyncio.get_running_loop().call_later(delay_s, self.wake.set)

    @metrics.stage_time("committed")
    def on_committed(self, settled: Sequence[Settlement]) -> None:
        """Handle committed settlements: their work items are about to be read back, and the buffer may have room."""
        now_ms = self.clock()
        for settlement in settled:
            claim = settlement.claim
            self.scheduler.in_flight.committed_own(claim.coordinate, now_ms)
        self.response_cache.committed(settlement.claim for settlement in settled)
        self.cancellation.on_committed(settled)
        self.intake.on_room()
        self.wake.set()

    async def on_revoked(self) -> None:
        """Drop the state of revoked partitions; their new owner reads the records again and charges their quotas."""
        is_current = self.ownership.is_current
        self.intake.discard(is_current)
        self.cancellation.discard(is_current)
        self.deduplication.discard(is_current)
        self.response_cache.discard(is_current)
        self.inbox.keep(lambda one: is_current(one.claim))
        self.evaluation.discard(is_current)
        gone = self.scheduler.discard(claim for claim in self.scheduler.claims() if not is_current(claim))
        gone += self.enrichment.take_back(lambda queued: not is_current(queued.claim))
        gone += self.output.discard(is_current)
        self.output.drop_admissions(gone)
        self.output.budgets.release(gone)
        if not self.ownership.partitions():
            self.scheduler.in_flight.release_all()
            self.output.budgets.release_all()
        await self.output.charges.hand_over(gone)

    def paused_backfill(self) -> set[PartitionId]:
        """Backfill partitions to pause: their tenant has enough backfill queued, owes its quota, or has many duplicates
        waiting for look-up. And those of copies, while enough of them wait."""
        copies = self.evaluation.paused(self.ownership.partitions())
        tenants = self.scheduler.paused_backfill() | self.output.charges.debts.tenants() | self.deduplication.crowded()
        metrics.BACKFILL_PAUSED.set(len(tenants))
        if not tenants:
            return copies
        paused = set(map(backfill_topic, tenants))
        return copies | {partition for partition in self.ownership.partitions() if partition.topic in paused}

    async def close(self) -> None:
        """Cancel all look-ups and wait for their tasks."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        await self.response_cache.close()
        await self.enrichment.close()
