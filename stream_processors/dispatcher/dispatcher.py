"""The dispatcher's main loop: takes records from Faust, decides, submits settlements to the transaction loop."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.codec import SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.names import backfill_topic, is_backfill
from fairlane.outcomes import Decision
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.records import ModelVersion, SourceCoordinate, TenantSpec
from fairlane.schema_registry import RegistryError
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.admission.decision import AdmissionDecision
from stream_processors.dispatcher.admission.stage import AdmissionStage
from stream_processors.dispatcher.cancellation import CancellationService
from stream_processors.dispatcher.deduplication.accepted_ids import AcceptedIds
from stream_processors.dispatcher.deduplication.stage import DuplicateResolver
from stream_processors.dispatcher.enrichment.awaiting_enrichment import AwaitingEnrichment
from stream_processors.dispatcher.enrichment.context import refusal_of
from stream_processors.dispatcher.intake.arrival import ReceivedRecord
from stream_processors.dispatcher.intake.buffer import IntakeBuffer
from stream_processors.dispatcher.intake.cancel import CancelCommand
from stream_processors.dispatcher.intake.invalid_pace import InvalidRecordLimiter
from stream_processors.dispatcher.intake.pools import reassigns_pools
from stream_processors.dispatcher.intake.schema_waits import SchemaWaitQueue
from stream_processors.dispatcher.intake.stage import Intake
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.rejected_and_expired import RejectedAndExpired
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.output.tenant_stats import TenantStats
from stream_processors.dispatcher.pool_reassignment import reassign_queued
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.response_cache.cached_reply import CachedReplyWriter
from stream_processors.dispatcher.response_cache.lookup import CacheHit
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.scheduler import Scheduler
from stream_processors.dispatcher.scheduling.turns import Turn

log = get_logger(__name__)

_MAX_INTAKE_BATCH = 512
_LINGER_S = 0.002
_LINGER_FROM_ITEMS = 4
_MOST_THAT_WAITED = 64
"""Records that waited for a schema and are decided between two commits. More would delay the other tenants' records in
the next transactions."""

_NOT_REGISTERED = "it is registered under none of the subjects that count, or refused"
_TOO_MUCH_WAITS = "the schema registry does not answer, and too much waits for it"

_Verdict = QueuedRequest | CancelCommand | tuple[OutputRecord, ...]


def _nothing() -> None: ...


def _ignore(_pool: str, _priority_class: str) -> None: ...


@dataclass(slots=True)
class Dispatcher:
    """Takes each record through intake, deduplication, response cache, admission, enrichment and dispatch.

    Everything runs on the event loop. No method raises because of a single record.
    """

    ownership: Ownership
    transactions: TransactionLoop
    intake: Intake
    admitter: AdmissionDecision
    admissions: AdmissionStage
    scheduler: Scheduler[QueuedRequest]
    writer: DecisionWriter
    counts: TenantCounters
    stats: TenantStats
    duplicates: AcceptedIds
    repeats: DuplicateResolver
    unserved: RejectedAndExpired
    cancels: CancellationService
    undecided: IntakeBuffer
    invalid_pace: InvalidRecordLimiter
    schemas: SchemaWaitQueue
    context: AwaitingEnrichment
    answers: ResponseCacheStage
    answer_writer: CachedReplyWriter
    clock: ClockMs
    on_backlog: Callable[[str, str], None] = _ignore
    """Called with each pool and class that has a backlog."""
    on_backfill: Callable[[], None] = _nothing
    """Called when backfill was decided or a tenant's debt was paid: partitions may have to be paused or resumed."""
    _something_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _tried_again: list[tuple[ReceivedRecord, QueuedRequest]] = field(default_factory=list)
    """Requests to be admitted in the next batch: duplicates whose first was rejected for now, and cache misses."""
    _given: dict[Claim, QueuedRequest] = field(default_factory=dict)
    """Requests answered from the response cache and not committed yet."""
    _takes_waiting: bool = True
    """Whether a commit happened since records that waited for a schema were last decided."""
    _failure: Exception | None = None
    _payday: asyncio.TimerHandle | None = None

    def set_registry(
        self, tenants: Mapping[str, TenantSpec], models: Mapping[str, ModelVersion], parts: Mapping[str, float]
    ) -> None:
        """Set the tenants and models; ``parts`` as in ``Scheduler.set_tenants``. Queued requests move to the pool that
        serves them now, or are rejected if none does."""
        moves = reassigns_pools(self.intake.tenants, tenants, self.intake.models, models)
        self.intake.set_registry(tenants, models)
        self.admitter.set_registry(tenants, models)
        self.scheduler.set_tenants(tenants, parts)
        if moves:
            now_ms = self.clock()
            for queued, refusal in reassign_queued(self.scheduler, self.intake):
                self.unserved.refuse(queued, refusal, now_ms)
            if self.unserved:
                self._something_arrived.set()

    async def on_record(self, message: Any) -> None:
        """Take one record from Faust. Backpressure: waits while the intake buffer is full, which stops fetching."""
        partition = PartitionId(message.topic, message.partition)
        # FencedThread stores a ``Fetched`` in this field.
        fetched = message.checksum
        unreadable = None if fetched is None else fetched.unreadable
        claim = self.ownership.deliver(partition, message.offset, None if fetched is None else fetched.epoch)
        if claim is None:
            return
        arrival = ReceivedRecord(
            partition,
            message.offset,
            round(message.timestamp * 1000),
            message.key,
            message.value,
            tuple(message.headers),
            *(() if unreadable is None else unreadable),
        )
        self.undecided.add(claim, arrival)
        self.invalid_pace.arrived(partition, self.clock())
        self._something_arrived.set()
        await self.undecided.wait_for_room()

    def on_committed(self, settled: Sequence[Settlement]) -> None:
        """Handle committed settlements: their work items are about to be read back, and the buffer may have room."""
        now_ms = self.clock()
        for settlement in settled:
            claim = settlement.claim
            self.scheduler.in_flight.committed_own(SourceCoordinate(*claim.partition, claim.offset), now_ms)
        self.answers.committed(settlement.claim for settlement in settled)
        if self._given:
            for settlement in settled:
                given = self._given.pop(settlement.claim, None)
                if given is not None:
                    self.repeats.ends.answered(given.tenant, given.request_id)
        self.cancels.on_committed(settled)
        self.on_room()

    def on_room(self) -> None:
        """Re-check for room after a commit or a drop. Spurious calls are harmless."""
        self.undecided.on_room()
        if self.schemas:
            self._takes_waiting = True
            self._something_arrived.set()

    async def on_revoked(self) -> None:
        """Drop the state of revoked partitions; their new owner reads the records again and charges their quotas."""
        is_current = self.ownership.is_current
        self.undecided.discard(is_current)
        self.schemas.discard(is_current)
        self.cancels.discard(is_current)
        self.repeats.discard(is_current)
        self.answers.discard(is_current)
        self._given = {claim: queued for claim, queued in self._given.items() if is_current(claim)}
        self._tried_again = [one for one in self._tried_again if is_current(one[1].claim)]
        gone = self.scheduler.discard(claim for claim in self.scheduler.claims() if not is_current(claim))
        gone += self.context.take_back(lambda queued: not is_current(queued.claim))
        for queued in gone:
            self.admissions.audited(queued.claim)
        gone += self.unserved.discard(is_current)
        if not self.ownership.partitions():
            self.scheduler.in_flight.release_all()
        await self.admitter.hand_over(gone)

    async def run(self) -> None:
        """Decide arrived records batch by batch; a batch is what arrived while the previous one was decided.

        Under load it lingers for a larger batch, since each costs a Redis round trip and a transaction. A request that
        arrives alone never waits.
        """
        last_items = 0
        while True:
            await self._something_arrived.wait()
            self._something_arrived.clear()
            self._raise_failure()
            while self.undecided or self._tried_again or self._has_waited():
                self._raise_failure()
                if last_items >= _LINGER_FROM_ITEMS and len(self.undecided) < _MAX_INTAKE_BATCH:
                    await asyncio.sleep(_LINGER_S)
                last_items = len(self.undecided)
                batch = self.undecided.take(_MAX_INTAKE_BATCH)
                await self._decide(batch)
                if self.schemas:
                    self.undecided.on_change()
                if any(is_backfill(arrival.partition.topic) for _, arrival in batch):
                    self.on_backfill()
                self.dispatch()
                self.admissions.note_waiting()
                await self.unserved.send()
                await self.pay_debts()
                for pool, priority_class in self.scheduler.backlogs():
                    self.on_backlog(pool, priority_class)
                self.counts.flush()
            await self.unserved.send()
            await self.pay_debts()

    def dispatch(self) -> None:
        """Dispatch requests whose turn has come, in queue order. The oldest of a partition that is about to be
        paused goes first among its own tenant's, never before other tenants'."""
        now_ms = self.clock()
        settlements: list[Settlement] = []
        late: list[QueuedRequest] = []
        for turn in self.scheduler.turns(now_ms, self.ownership.escalated()):
            if turn.is_late:
                late.append(turn.item)
                continue
            queued = self.context.take(turn, self._on_context)
            if queued is not None and (settlement := self._sent_on(self._with_context(turn, queued), now_ms)):
                settlements.append(settlement)
        if settlements:
            self.transactions.submit_many(settlements)
        self._answer_late(late, now_ms)

    def _on_context(self, turn: Turn[QueuedRequest], queued: QueuedRequest) -> None:
        """Dispatch a request whose enrichment has ended. Never raises: a failure is re-raised in ``run``."""
        try:
            settlement = self._sent_on(self._with_context(turn, queued), self.clock())
        except Exception as error:  # noqa: BLE001 - raised again in ``run``, whose owner sees the failure
            self._failure = error
            self._something_arrived.set()
            return
        if settlement is not None:
            self.transactions.submit(settlement)

    def _on_answer(self, arrival: ReceivedRecord, queued: QueuedRequest, known: CacheHit | None) -> None:
        """Answer from the response cache on a usable hit, else admit. Never raises: a failure is re-raised in
        ``run``."""
        now_ms = self.clock()
        settlement: Settlement | None = None
        try:
            if known is not None and now_ms <= queued.deadline_at_ms and self._may_have(queued, known):
                settlement = Settlement(queued.claim, self.answer_writer.answered(queued, known, now_ms))
        except RegistryError as error:
            self._failure = error
            self._something_arrived.set()
            return
        except Exception as error:  # noqa: BLE001 - what stood in the cache is unusable: the request is admitted
            log.error("earlier_answer_unusable", tenant=queued.tenant, error=type(error).__name__)
        if settlement is None:
            self._try_again(arrival, queued)
            return
        self._given[queued.claim] = queued
        self.counts.decided(queued.tenant, Decision.CACHED)
        self.transactions.submit(settlement)

    def _may_have(self, queued: QueuedRequest, known: CacheHit) -> bool:
        """Whether the cached answer is one this tenant may get now: same model version, within its prompt bound."""
        now = self.intake.as_of_now(queued)
        if isinstance(now, Rejection) or (now.model.model, now.model.version) != (
            known.answer.model,
            known.answer.model_version,
        ):
            return False
        most = now.max_prompt_tokens
        return most is None or known.answer.usage.prompt_tokens <= most

    def _with_context(self, turn: Turn[QueuedRequest], queued: QueuedRequest) -> Turn[QueuedRequest]:
        """The turn with the enriched request. Corrects its cost in the scheduler and counts new degradations."""
        if queued is turn.item:
            return turn
        self.scheduler.change_cost(turn.item, queued)
        found_tokens = queued.prompt_tokens - turn.item.prompt_tokens + turn.item.expected_tokens
        self.intake.context.learn(queued.tenant, queued.request, found_tokens)
        steps = [step for step in queued.degradations if step not in turn.item.degradations]
        if steps:
            self.counts.degraded(queued.tenant, steps)
        return replace(turn, item=queued)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _sent_on(self, turn: Turn[QueuedRequest], now_ms: int) -> Settlement | None:
        """The settlement with the work item; None if the enriched request is rejected."""
        queued, claim = turn.item, turn.item.claim
        refusal = refusal_of(queued)
        if refusal is not None:
            self.context.release(claim)
            self.scheduler.refund(queued)
            self.admissions.audited(claim)
            self.unserved.refuse(queued, refusal, now_ms)
            self._something_arrived.set()
            return None
        if queued.passages or queued.history:
            source = SourceCoordinate(*claim.partition, claim.offset)
            texts = (*(one.text for one in queued.passages), *(said.content for said in queued.history))
            self.scheduler.in_flight.add_input(source, sum(len(text.encode(errors="replace")) for text in texts))
        return self._dispatched(turn, now_ms)

    def _answer_late(self, late: Sequence[QueuedRequest], now_ms: int) -> None:
        self.unserved.answer_late(late, now_ms)
        if self.unserved:
            self._something_arrived.set()

    def sweep(self) -> None:
        """Answer queued requests that cannot finish in time, and drop obsolete look-ups. Call it periodically."""
        now_ms = self.clock()
        self._answer_late(self.scheduler.take_late(now_ms), now_ms)
        self.context.keep(self.scheduler.holds)
        self.answers.sweep()
        self.counts.flush()

    async def pay_debts(self) -> None:
        """Pay the debts of backfill as far as quotas grant it now, and schedule the next payment."""
        if await self.admitter.pay_debts(self.clock()):
            self.on_backfill()
        if self._payday is not None:
            self._payday.cancel()
            self._payday = None
        due_at_ms = self.admitter.debts.next_due_ms()
        if due_at_ms is not None:
            delay_s = max(1, due_at_ms - self.clock()) / 1_000
            self._payday = asyncio.get_running_loop().call_later(delay_s, self._something_arrived.set)

    def held_intake(self) -> set[PartitionId]:
        """Partitions to hold: crowded intake buffer, too many recent invalid records, or many waits for a schema."""
        return self.undecided.crowded() | self.invalid_pace.in_debt(self.clock()) | self.schemas.crowded()

    def paused_backfill(self) -> set[PartitionId]:
        """Backfill partitions to pause: their tenant has enough backfill queued, owes its quota, or has many duplicates
        waiting for look-up."""
        tenants = self.scheduler.paused_backfill() | self.admitter.debts.tenants() | self.repeats.crowded()
        metrics.BACKFILL_PAUSED.set(len(tenants))
        if not tenants:
            return set()
        paused = set(map(backfill_topic, tenants))
        return {partition for partition in self.ownership.partitions() if partition.topic in paused}

    def _turned_away(self, claim: Claim, arrival: ReceivedRecord, outputs: tuple[OutputRecord, ...]) -> None:
        """Submit a rejection or a dead letter, and charge its partition's budget of invalid records."""
        self.transactions.submit(Settlement(claim, outputs))
        if self.invalid_pace.charge(claim.partition, arrival.cost_bytes, self.clock()):
            self.undecided.on_change()

    async def _decide(self, batch: Sequence[tuple[Claim, ReceivedRecord]]) -> None:
        fresh: list[QueuedRequest] = []
        again: list[QueuedRequest] = []
        cancels: list[CancelCommand] = []
        arrivals: dict[Claim, ReceivedRecord] = {}
        for claim, arrival, verdict in self._verdicts(batch):
            arrivals[claim] = arrival
            if isinstance(verdict, QueuedRequest):
                (again if verdict.handed_back else fresh).append(verdict)
            elif isinstance(verdict, CancelCommand):
                cancels.append(verdict)
            else:
                self._turned_away(claim, arrival, verdict)
        if fresh:
            fresh = await self._without_duplicates(fresh, arrivals)
            fresh = [one for one in fresh if not self.answers.begin(arrivals[one.claim], one, self._on_answer)]
        tried_again = self._tried_again[:_MAX_INTAKE_BATCH]
        del self._tried_again[:_MAX_INTAKE_BATCH]
        for arrival, queued in tried_again:
            arrivals[queued.claim] = arrival
            fresh.append(queued)
        if fresh:
            await self.admissions.admit(fresh, arrivals)
        for queued in again:
            # Requeued work was admitted once and is not judged again.
            if self.ownership.is_current(queued.claim):
                try:
                    now_ms, now = self.clock(), self.intake.as_of_now(queued)
                    if isinstance(now, Rejection):
                        outputs = self.unserved.not_served(queued, now, now_ms)
                        self.transactions.submit(Settlement(queued.claim, outputs))
                        continue
                    reduced, notes = self.admitter.take_back(now, now_ms)
                    self.scheduler.push(reduced)
                    self.transactions.note(notes)
                except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                    self.admissions.bury(queued.claim, arrivals[queued.claim], error)
        if cancels:
            await self._cancel(cancels, arrivals)

    def _verdicts(
        self, batch: Sequence[tuple[Claim, ReceivedRecord]]
    ) -> Iterator[tuple[Claim, ReceivedRecord, _Verdict]]:
        """Decode and validate, keeping the order within each partition. A record with an unknown schema waits in
        ``schemas``, and so do all later records of its partition."""
        if self._has_waited():
            self._takes_waiting = False
            for claim, arrival in self.schemas.take(_MOST_THAT_WAITED):
                yield claim, arrival, self.intake.decide(claim, arrival, _NOT_REGISTERED)
        for claim, arrival in batch:
            if self.schemas.holds(arrival.partition):
                self.schemas.add(claim, arrival)
                continue
            try:
                verdict = self.intake.decide(claim, arrival)
            except SchemaNotLoadedError:
                self.schemas.add(claim, arrival)
                continue
            yield claim, arrival, verdict
        for claim, arrival in self.schemas.take_excess():
            yield claim, arrival, self.intake.decide(claim, arrival, _TOO_MUCH_WAITS)

    def _has_waited(self) -> bool:
        """Whether records that waited for a schema may be decided now."""
        return self._takes_waiting and self.schemas.is_ready()

    async def settle_schemas(self) -> None:
        """Look up unknown schemas, as a task besides intake."""
        self.schemas.on_answer = self._something_arrived.set
        await self.schemas.run()

    async def _cancel(self, cancels: Sequence[CancelCommand], arrivals: Mapping[Claim, ReceivedRecord]) -> None:
        """Carry out cancels. Earlier records of the batch are admitted by now; pending rejections are sent first."""
        while self.unserved:
            await self.unserved.send()
        for cancel in cancels:
            if self.ownership.is_current(cancel.claim):
                self._take_back(cancel)
                try:
                    looked_up = self.answers.find(cancel.tenant, cancel.request_id)
                    undecided = [*(queued for _, queued in self._tried_again), *looked_up]
                    self.cancels.carry_out(cancel, self.admissions.unaudited, undecided)
                    self._tried_again = [one for one in self._tried_again if not cancel.concerns(one[1])]
                    self.answers.drop(queued.claim for queued in undecided if cancel.concerns(queued))
                except RegistryError:
                    raise
                except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                    self.admissions.bury(cancel.claim, arrivals[cancel.claim], error)

    def _take_back(self, cancel: CancelCommand) -> None:
        """Put cancelled requests that await enrichment back into the queue, where the cancel finds them."""
        for queued in self.context.take_back(cancel.concerns):
            self.scheduler.refund(queued)
            self.scheduler.push(queued)

    async def _without_duplicates(
        self, fresh: Sequence[QueuedRequest], arrivals: Mapping[Claim, ReceivedRecord]
    ) -> list[QueuedRequest]:
        firsts = await self.duplicates.first_seen([queued.seen for queued in fresh])
        kept = []
        for queued, first in zip(fresh, firsts, strict=True):
            if not self.ownership.is_current(queued.claim):
                continue
            if first is not None:
                self.repeats.add(arrivals[queued.claim], queued, first)
            else:
                kept.append(queued)
        return kept

    async def settle_duplicates(self) -> None:
        """Settle duplicates, one look-up after the other, as a task besides intake."""
        await self.repeats.run(self.duplicates, self._try_again)

    def _try_again(self, arrival: ReceivedRecord, queued: QueuedRequest) -> None:
        self._tried_again.append((arrival, queued))
        self._something_arrived.set()

    def _dispatched(self, turn: Turn[QueuedRequest], now_ms: int) -> Settlement:
        queued = turn.item
        self.answers.sent(queued.claim)
        waited_ms = now_ms - queued.submitted_at_ms
        self.counts.dispatched(queued.tenant, queued.pool, queued.priority_class, waited_ms)
        self.stats.dispatched(queued.tenant, queued.pool, waited_ms, now_ms)
        taken = self.admissions.audited(queued.claim)
        if taken is None:
            return Settlement(queued.claim, self.writer.dispatched(turn, now_ms))
        outputs = self.writer.dispatched(turn, now_ms, taken.inputs)
        return Settlement(queued.claim, (*outputs, *taken.degraded))
