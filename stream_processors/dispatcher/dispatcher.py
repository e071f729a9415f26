"""The dispatcher's loop: records in from Faust, pure decisions, settlements out to the transaction loop."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import Any, Protocol

from fairlane import headers, metrics
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError, DecodeProblem
from fairlane.logs import get_logger
from fairlane.names import DEAD_LETTER_REQUESTS, is_backfill, tenant_of_source
from fairlane.outcomes import Code, Decision
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.records import InferenceReply, InferenceRequest, ModelVersion, SourceCoordinate, TenantSpec
from fairlane.registry import RegistryError
from fairlane.transactions import OutRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.decisions import Arrival, DecisionWriter
from stream_processors.dispatcher.duplicates import DuplicateIndex
from stream_processors.dispatcher.validation import Limits, Refusal, validate
from stream_processors.dispatcher.work_queue import QueuedRequest, WorkQueue, estimate_cost_tokens

log = get_logger(__name__)

_MAX_INTAKE_BATCH = 512
_LINGER_S = 0.002
_MAX_REPEATED = 1_000
_LINGER_FROM_ITEMS = 4


class ReplyArchive(Protocol):
    """Where settled replies can be looked up."""

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        """The committed reply to the request that stood at ``source``, if there is one and it can be reached."""


@dataclass(slots=True)
class Dispatcher:
    """Everything here runs on the event loop. Nothing here raises because of a record."""

    codec: Codec
    ownership: Ownership
    transactions: TransactionLoop
    writer: DecisionWriter
    queue: WorkQueue
    duplicates: DuplicateIndex
    archive: ReplyArchive
    limits: Limits
    max_held: int
    max_held_bytes: int
    clock: ClockMs
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    models: Mapping[str, ModelVersion] = field(default_factory=dict)
    _arrived: list[tuple[Claim, Arrival]] = field(default_factory=list)
    _something_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _read_bytes: int = 0
    _repeated: "asyncio.Queue[tuple[QueuedRequest, SourceCoordinate]]" = field(
        default_factory=lambda: asyncio.Queue(_MAX_REPEATED)
    )
    _read: Counter[str] = field(default_factory=Counter)
    _decided: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    async def on_record(self, message: Any) -> None:
        """Take one record from Faust. Waits while too much is held in memory, which stops the fetching."""
        partition = PartitionId(message.topic, message.partition)
        # The fetching thread left the epoch of the assignment there.
        claim = self.ownership.deliver(partition, message.offset, message.checksum)
        if claim is None:
            return
        arrival = Arrival(
            partition,
            message.offset,
            round(message.timestamp * 1000),
            message.key,
            message.value,
            tuple(message.headers),
        )
        self._arrived.append((claim, arrival))
        self._read_bytes += len(arrival.value or b"")
        self._something_arrived.set()
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def on_room(self) -> None:
        """Something was committed or dropped: there may be room again. Spurious calls do no harm."""
        if self._has_room():
            self._room.set()

    def _has_room(self) -> bool:
        if self._held >= self.max_held:
            return False
        if self._read_bytes >= self.max_held_bytes:
            # Counting is dear, so it is done only when that much was read since the last time.
            self._read_bytes = self._held_bytes()
        return self._read_bytes < self.max_held_bytes

    def _held_bytes(self) -> int:
        arrived = sum(len(arrival.value or b"") for _, arrival in self._arrived)
        return arrived + self.queue.size_bytes + self.transactions.pending_bytes

    def on_revoked(self) -> None:
        """Forget what waits of partitions that moved on; their new owner reads it again."""
        self._arrived = [(claim, arrival) for claim, arrival in self._arrived if self.ownership.is_current(claim)]
        self.queue.discard(claim for claim in self.queue.claims() if not self.ownership.is_current(claim))
        self._room.set()

    async def run(self) -> None:
        """Decide whatever arrived, batch after batch; a batch is what came while the last one was decided.

        Under load it lingers for a larger one: every batch costs a round trip to Redis and the work of a transaction. A
        request that comes alone never waits.
        """
        last_items = 0
        while True:
            await self._something_arrived.wait()
            self._something_arrived.clear()
            while self._arrived:
                if last_items >= _LINGER_FROM_ITEMS and len(self._arrived) < _MAX_INTAKE_BATCH:
                    await asyncio.sleep(_LINGER_S)
                last_items = len(self._arrived)
                batch, self._arrived = self._arrived[:_MAX_INTAKE_BATCH], self._arrived[_MAX_INTAKE_BATCH:]
                await self._intake(batch)
                self.dispatch()
                self._flush_counts()

    def dispatch(self) -> None:
        """Send on what may go: first the oldest of partitions that would block, then in the queue's order."""
        now_ms = self.clock()
        settlements = []
        for claim in self.ownership.escalated():
            queued = self.queue.take(claim)
            if queued is not None:
                settlements.append(self._dispatch_one(queued, now_ms))
        while (queued := self.queue.pop(now_ms)) is not None:
            settlements.append(self._dispatch_one(queued, now_ms))
        if settlements:
            self.transactions.submit_many(settlements)

    @property
    def _held(self) -> int:
        return len(self._arrived) + len(self.queue) + self.transactions.pending_count

    async def _intake(self, batch: Sequence[tuple[Claim, Arrival]]) -> None:
        admitted = []
        self._read.update(tenant_of_source(arrival.partition.topic) for _, arrival in batch)
        for claim, arrival in batch:
            tenant = tenant_of_source(arrival.partition.topic)
            try:
                verdict = self._decide(claim, arrival, tenant)
            except RegistryError:
                # The registry is out of reach: the record may be perfectly good. End, restart, read it again.
                raise
            except Exception as error:  # noqa: BLE001 - what our own code fails on is buried, and nothing else stops
                verdict = self._broken(arrival, tenant, error)
            if isinstance(verdict, QueuedRequest):
                admitted.append(verdict)
            else:
                self.transactions.submit(Settlement(claim, verdict))
        if admitted:
            await self._admit(admitted)

    def _decide(self, claim: Claim, arrival: Arrival, tenant: str) -> QueuedRequest | tuple[OutRecord, ...]:
        now_ms = self.clock()
        try:
            request = self.codec.decode_as(InferenceRequest, arrival.value)
        except DecodeError as error:
            self._count(tenant, Decision.DEAD_LETTERED, error.problem)
            metrics.DEAD_LETTERS.labels(topic=DEAD_LETTER_REQUESTS, problem=error.problem).inc()
            return self.writer.dead_letter(arrival, tenant, error, now_ms)
        spec = self.tenants.get(tenant)
        backfill = is_backfill(arrival.partition.topic)
        verdict = validate(request, tenant, spec, self.models, self.limits, backfill=backfill)
        if isinstance(verdict, Refusal):
            self._count(tenant, Decision.REFUSED, verdict.code)
            return self.writer.refused(request, arrival, tenant, spec, verdict, now_ms)
        return QueuedRequest(
            claim=claim,
            tenant=tenant,
            request=request,
            model=verdict.model,
            reply_topic=verdict.reply_topic,
            cost_tokens=estimate_cost_tokens(request, verdict.model, verdict.input_bytes),
            size_bytes=len(arrival.value or b""),
            submitted_at_ms=arrival.timestamp_ms,
            admitted_at_ms=now_ms,
            deadline_at_ms=arrival.timestamp_ms + verdict.timeout_ms,
            trace_headers=tuple(header for header in arrival.headers if header[0] == headers.TRACE_PARENT),
        )

    def _broken(self, arrival: Arrival, tenant: str, error: Exception) -> tuple[OutRecord, ...]:
        """A record that our own code failed on: keep its bytes where an operator sees them."""
        metrics.DEAD_LETTERS.labels(topic=DEAD_LETTER_REQUESTS, problem="intake_failed").inc()
        # The type and the line alone: the text of an unforeseen exception may quote the record.
        *_, frame = extract_tb(error.__traceback__)
        log.error(
            "intake_failed",
            topic=arrival.partition.topic,
            offset=arrival.offset,
            error=type(error).__name__,
            raised_at=f"{frame.filename}:{frame.lineno}",
        )
        problem = DecodeError(DecodeProblem.INTAKE_FAILED, type(error).__name__)
        return self.writer.dead_letter(arrival, tenant, problem, self.clock())

    async def _admit(self, admitted: Sequence[QueuedRequest]) -> None:
        entries = [
            (queued.tenant, queued.request.request_id, SourceCoordinate(*queued.claim.partition, queued.claim.offset))
            for queued in admitted
        ]
        firsts = await self.duplicates.first_seen(entries)
        for queued, first in zip(admitted, firsts, strict=True):
            if first is not None:
                self._count(queued.tenant, Decision.DUPLICATE, "")
                self._settle_duplicate(queued, first)
            elif self.ownership.is_current(queued.claim):
                self.queue.push(queued)

    def _settle_duplicate(self, queued: QueuedRequest, first: SourceCoordinate) -> None:
        """Queue it for look-up, apart from intake; what does not fit is settled without a copy of the reply."""
        try:
            self._repeated.put_nowait((queued, first))
        except asyncio.QueueFull:
            self.transactions.submit(Settlement(queued.claim, self.writer.duplicate(queued, first, None, self.clock())))

    async def settle_duplicates(self) -> None:
        """Send stored replies again, one look-up after the other."""
        while True:
            queued, first = await self._repeated.get()
            reply = await self.archive.find(queued.tenant, queued.request.request_id, first)
            replayed = None if reply is None else (queued.reply_topic, replace(reply, replayed=True))
            outputs = self.writer.duplicate(queued, first, replayed, self.clock())
            self.transactions.submit(Settlement(queued.claim, outputs))

    def _dispatch_one(self, queued: QueuedRequest, now_ms: int) -> Settlement:
        if now_ms > queued.deadline_at_ms:
            self._count(queued.tenant, Decision.EXPIRED, "")
            return Settlement(queued.claim, self.writer.expired(queued, now_ms))
        self._count(queued.tenant, Decision.DISPATCHED, "")
        return Settlement(queued.claim, self.writer.dispatched(queued, now_ms))

    def _count(self, tenant: str, decision: Decision, code: Code | str) -> None:
        self._decided[tenant, decision, str(code)] += 1

    def _flush_counts(self) -> None:
        """Bring the metrics up to date, once per batch: a labelled counter is too dear to touch for every record."""
        for tenant, count in self._read.items():
            metrics.REQUESTS_READ.labels(tenant=tenant).inc(count)
        for (tenant, decision, code), count in self._decided.items():
            metrics.DECISIONS.labels(tenant=tenant, decision=decision, code=code).inc(count)
        self._read.clear()
        self._decided.clear()
