"""Enrichment stage: looks up passages and history of requests that wait for their turn, or whose turn has come."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.outcomes import Degradation, HistoryReason, Priority, RetrievalReason
from fairlane.ownership import Claim
from fairlane.records import Retrieval
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Permit, Urgency
from stream_processors.dispatcher.enrichment.context import (
    Context,
    ReadHistory,
    Retrieved,
    is_enough,
    needs_context,
    needs_history,
    needs_passages,
    nothing,
    query_text,
    room_for_history,
    with_context,
)
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.dispatcher.enrichment.retriever import LEAST_BUDGET_S, Retriever
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.in_flight import InFlight
from stream_processors.dispatcher.scheduling.scheduler import Turn

log = get_logger(__name__)

_BACKFILL_BUDGETS = 20
"""Budgets that backfill waits for a permit and for an answer: it has time, and gives way to everything else. A turn of
a conversation that is not recorded yet is awaited no longer than by others."""

_TENANTS_THAT_SHARE = 4
"""One tenant may use at most 1/4 of the look-ups."""


@dataclass(slots=True, eq=False)
class _Lookup:
    queued: QueuedRequest
    task: "asyncio.Task[None]"
    permit: Permit | None = None
    timeout: asyncio.Timeout | None = None
    is_its_turn: bool = False
    known: Context = field(default_factory=Context)
    """What was found before this look-up."""
    found: Context | None = None
    found_bytes: int = 0


@dataclass(slots=True)
class EnrichmentStage:
    """Looks up the passages and the conversation history of queued requests, concurrently with their wait; for the
    others, and for backfill, once their turn has come.

    Both are one look-up. The budget is the longest wait of a request whose turn has come. Before its turn, the budget
    bounds the search only, not the wait for a permit. Turns that await enrichment count as in flight; the reservation
    is released if one is not dispatched after all. On one event loop; nothing here raises because of a request.

    Attributes:
        wake: set when ``ready`` has something to return.
        max_kept: most look-ups before their requests' turn, completed ones included; a quarter of it for one tenant.
        max_kept_bytes: most bytes of text found for them.
    """

    retriever: Retriever
    histories: HistoryReader
    limiter: FairConcurrencyLimiter
    budget_s: float
    in_flight: InFlight
    wake: asyncio.Event
    max_kept: int = 1_024
    max_kept_bytes: int = 64 * 1024 * 1024
    _lookups: dict[Claim, _Lookup] = field(default_factory=dict)
    _turns: dict[Claim, Turn[QueuedRequest]] = field(default_factory=dict)
    """Turns awaiting enrichment."""
    _ready: list[QueuedRequest] = field(default_factory=list)
    """Enriched requests, for ``ready``."""
    _by_tenant: Counter[str] = field(default_factory=Counter)
    _bytes: int = 0

    def begin(self, queued: QueuedRequest) -> None:
        """Start the look-up of a request that was queued. Not of backfill: hours may pass until its turn."""
        if (
            needs_context(queued)
            and not queued.is_backfill
            and len(self._lookups) < self.max_kept
            and self._by_tenant[queued.tenant] < max(1, self.max_kept // _TENANTS_THAT_SHARE)
        ):
            self._start(queued, is_its_turn=False)

    def submit(self, turn: Turn[QueuedRequest]) -> QueuedRequest | None:
        """The enriched request; None while its look-up goes on, after which ``ready`` returns it, within the budget."""
        queued = turn.item
        if not needs_context(queued):
            return queued
        known = Context()
        lookup = self._lookups.get(queued.claim)
        if lookup is not None and lookup.found is not None:
            self._drop(queued.claim)
            known = lookup.found.lasting
            if is_enough(queued, known):
                return with_context(queued, known)
            lookup = None
        if lookup is None:
            lookup = self._start(queued, is_its_turn=True)
            lookup.known = known
        # The present request counts: it may have been given another model since its look-up began.
        lookup.queued, lookup.is_its_turn = queued, True
        if lookup.permit is not None:
            self.limiter.hurry(lookup.permit, _urgency(queued, is_its_turn=True))
        if lookup.timeout is not None:
            soonest = asyncio.get_running_loop().time() + self._budget_s(queued)
            already = lookup.timeout.when()
            lookup.timeout.reschedule(soonest if already is None else min(already, soonest))
        self._turns[queued.claim] = turn
        return None

    def ready(self) -> list[tuple[Turn[QueuedRequest], QueuedRequest]]:
        """Remove and return the turns whose enrichment has ended, each with the enriched request."""
        ready, self._ready = self._ready, []
        return [(self._turns.pop(queued.claim), queued) for queued in ready]

    def take_back(self, wanted: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        """Remove and return the matching requests that await enrichment, and release their reservations."""
        taken = [turn.item for turn in self._turns.values() if wanted(turn.item)]
        for queued in taken:
            del self._turns[queued.claim]
            self.release(queued.claim)
        self._ready = [queued for queued in self._ready if queued.claim in self._turns]
        return taken

    def release(self, claim: Claim) -> None:
        """Release the in-flight reservation of a request that is not dispatched."""
        self.in_flight.release(claim.coordinate)

    def keep(self, is_queued: Callable[[Claim], bool]) -> None:
        """Cancel the look-ups of requests that are neither queued nor await enrichment: cancelled, late or revoked."""
        for claim in [claim for claim in self._lookups if not is_queued(claim) and claim not in self._turns]:
            self._drop(claim).task.cancel()

    async def close(self) -> None:
        tasks = [lookup.task for lookup in self._lookups.values()]
        self._turns.clear()
        self.keep(lambda _claim: False)
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._lookups)

    def _start(self, queued: QueuedRequest, *, is_its_turn: bool) -> _Lookup:
        # A task starts only after this returns, so it finds its look-up in permit.
        task = asyncio.get_running_loop().create_task(self._look_up(queued.claim), name="context")
        lookup = self._lookups[queued.claim] = _Lookup(queued, task, is_its_turn=is_its_turn)
        self._by_tenant[queued.tenant] += 1
        return lookup

    def _drop(self, claim: Claim) -> _Lookup:
        lookup = self._lookups.pop(claim)
        tenant = lookup.queued.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._bytes -= lookup.found_bytes
        return lookup

    async def _look_up(self, claim: Claim) -> None:
        lookup = self._lookups[claim]
        try:
            found = await self._found(lookup)
            ready = with_context(lookup.queued, found)
        except Exception as error:  # noqa: BLE001 - better answered without context than not at all
            log.error("context_broken", tenant=lookup.queued.tenant, error=type(error).__name__)
            found = _without(lookup.queued, Context(), RetrievalReason.UNAVAILABLE, HistoryReason.UNAVAILABLE)
            ready = with_context(lookup.queued, found)
        _count(found, lookup.known)
        if self._lookups.get(claim) is not lookup:
            return
        if lookup.is_its_turn:
            self._drop(claim)
            if claim in self._turns:
                self._ready.append(ready)
                self.wake.set()
            return
        lookup.found, lookup.found_bytes = found, found.size_bytes
        self._bytes += lookup.found_bytes
        if self._bytes > self.max_kept_bytes:
            # Looked up again when its turn has come.
            self._drop(claim)

    async def _found(self, lookup: _Lookup) -> Context:
        queued, known, loop = lookup.queued, lookup.known, asyncio.get_running_loop()
        urgency = _urgency(queued, is_its_turn=lookup.is_its_turn)
        permit = lookup.permit = self.limiter.permit(queued.tenant, urgency)
        budget_s = self._budget_s(queued)
        try:
            try:
                async with asyncio.timeout(budget_s if lookup.is_its_turn else None) as lookup.timeout:
                    await permit.granted
            except TimeoutError:
                return _without(queued, known, RetrievalReason.BUSY, HistoryReason.BUSY)
            left_s = budget_s
            if lookup.is_its_turn and (until_s := lookup.timeout.when()) is not None:
                left_s = until_s - loop.time()
            lookup.timeout = None
            if left_s < LEAST_BUDGET_S:
                return _without(queued, known, RetrievalReason.BUSY, HistoryReason.BUSY)
            return await self._both(lookup, permit, left_s)
        finally:
            lookup.permit = None
            self.limiter.leave(permit)

    async def _both(self, lookup: _Lookup, permit: Permit, budget_s: float) -> Context:
        """Look up what the request needs and does not have yet, concurrently."""
        queued, known = lookup.queued, lookup.known
        wants_passages = known.passages is None and needs_passages(queued)
        wants_history = known.history is None and needs_history(queued)
        permit.queries = wants_passages + wants_history
        if wants_passages and wants_history:
            async with asyncio.TaskGroup() as tasks:
                found = tasks.create_task(self._passages(queued, permit, budget_s))
                read = tasks.create_task(self._history(lookup, permit, budget_s))
            return Context(found.result(), read.result())
        return Context(
            await self._passages(queued, permit, budget_s) if wants_passages else known.passages,
            await self._history(lookup, permit, budget_s) if wants_history else known.history,
        )

    async def _passages(self, queued: QueuedRequest, permit: Permit, budget_s: float) -> Retrieved:
        wanted = queued.request.retrieval
        assert wanted is not None  # noqa: S101 - see needs_passages
        async with permit.asking(asyncio.get_running_loop().time() + budget_s):
            return await self.retriever.retrieve(queued.tenant, wanted, query_text(queued.request), budget_s)

    async def _history(self, lookup: _Lookup, permit: Permit, budget_s: float) -> ReadHistory:
        request = lookup.queued.request
        return await self.histories.read(
            lookup.queued.tenant,
            request.conversation_id or "",
            request.conversation_after,
            room_for_history(lookup.queued),
            budget_s,
            lambda: lookup.is_its_turn,
            max_wait_s=self.budget_s,
            asking=permit.asking,
        )

    def _budget_s(self, queued: QueuedRequest) -> float:
        if queued.is_backfill:
            return self.budget_s * _BACKFILL_BUDGETS
        return self.budget_s / 2 if Degradation.SHORTER_RETRIEVAL in queued.degradations else self.budget_s


def _urgency(queued: QueuedRequest, *, is_its_turn: bool) -> Urgency:
    if not is_its_turn:
        return Urgency.WAITS
    if queued.is_backfill or queued.priority_class == Priority.LOW:
        return Urgency.TURN_LOW
    return Urgency.TURN_HIGH if queued.priority_class == Priority.HIGH else Urgency.TURN_NORMAL


def _without(queued: QueuedRequest, known: Context, passages: RetrievalReason, history: HistoryReason) -> Context:
    wanted = queued.request.retrieval or Retrieval("")
    return Context(
        nothing(wanted.collection, passages) if known.passages is None and needs_passages(queued) else known.passages,
        ReadHistory(reason=history) if known.history is None and needs_history(queued) else known.history,
    )


def _count(found: Context, known: Context) -> None:
    if found.passages is not None and found.passages is not known.passages:
        use = found.passages.use
        metrics.RETRIEVALS.labels(mode=use.mode, reason=use.reason or "").inc()
    if found.history is not None and found.history is not known.history:
        metrics.HISTORIES.labels(reason=found.history.reason or "").inc()
