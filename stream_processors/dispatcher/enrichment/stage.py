"""Enrichment stage: looks up passages and history while requests wait for their turn."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.outcomes import HistoryReason, Priority, RetrievalReason
from fairlane.ownership import Claim
from fairlane.records import Retrieval
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Ticket, Urgency
from stream_processors.dispatcher.enrichment.context import (
    Context,
    is_enough,
    needs_context,
    needs_history,
    needs_passages,
    room_for_history,
    with_context,
)
from stream_processors.dispatcher.enrichment.history import HistoryReader, Remembered
from stream_processors.dispatcher.enrichment.permit import Permit
from stream_processors.dispatcher.enrichment.query_text import query_text
from stream_processors.dispatcher.enrichment.retriever import LEAST_BUDGET_S, Retrieved, Retriever, nothing
from stream_processors.dispatcher.queued_request import QueuedRequest

log = get_logger(__name__)

_BACKFILL_PATIENCE = 20
"""Budgets that backfill waits for a place and for an answer: it has time, and gives way to everything else. A turn that
is not recorded yet is waited for no longer than by others."""

_TENANTS_THAT_SHARE = 4
"""A tenant keeps at most this part of what is kept."""

OnReady = Callable[[QueuedRequest], None]
"""Told the request with its context, on the event loop. Must not raise."""


@dataclass(slots=True, eq=False)
class _Lookup:
    queued: QueuedRequest
    task: "asyncio.Task[None]"
    ticket: Ticket | None = None
    timeout: asyncio.Timeout | None = None
    is_its_turn: bool = False
    known: Context = field(default_factory=Context)
    """What was found before this look-up."""
    found: Context | None = None
    found_bytes: int = 0
    on_ready: OnReady | None = None


@dataclass(slots=True)
class Enrichment:
    """Looks up passages, and what was said before, for what waits, so much of it at a time; for the others when their
    turn has come.

    Both are looked up at once, as one look-up. The budget is what a request whose turn has come waits at most. Before
    that, only the search itself is bounded by it, not the line before it. On one event loop; nothing here raises
    because of a request.

    Attributes:
        max_kept: most look-ups before their requests' turn, done ones included; of one tenant a quarter of it.
        max_kept_bytes: most text that was found and waits.
    """

    retriever: Retriever
    histories: HistoryReader
    gate: FairConcurrencyLimiter
    budget_s: float
    max_kept: int = 1_024
    max_kept_bytes: int = 64 * 1024 * 1024
    _lookups: dict[Claim, _Lookup] = field(default_factory=dict)
    _by_tenant: Counter[str] = field(default_factory=Counter)
    _bytes: int = 0

    def begin(self, queued: QueuedRequest) -> None:
        """It waits from now on. Backfill is looked up when its turn has come: hours may pass until then."""
        if (
            needs_context(queued)
            and not queued.is_backfill
            and len(self._lookups) < self.max_kept
            and self._by_tenant[queued.tenant] < max(1, self.max_kept // _TENANTS_THAT_SHARE)
        ):
            self._start(queued, is_its_turn=False)

    def enrich(self, queued: QueuedRequest, on_ready: OnReady) -> QueuedRequest | None:
        """Its turn has come. The request with its context; None when that is still looked up: ``on_ready`` is told it
        within the budget, unless it is not kept."""
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
        # What it is now counts, not what it was when it came: it may have been given another model since.
        lookup.queued, lookup.on_ready, lookup.is_its_turn = queued, on_ready, True
        if lookup.ticket is not None:
            self.gate.hurry(lookup.ticket, _urgency(queued, is_its_turn=True))
        if lookup.timeout is not None:
            soonest = asyncio.get_running_loop().time() + self._budget_s(queued)
            already = lookup.timeout.when()
            lookup.timeout.reschedule(soonest if already is None else min(already, soonest))
        return None

    def keep(self, is_wanted: Callable[[Claim], bool]) -> None:
        """Forget what waits no longer: what was cancelled, answered late, or moved on with its partition."""
        for claim in [claim for claim in self._lookups if not is_wanted(claim)]:
            self._drop(claim).task.cancel()

    async def close(self) -> None:
        """Forget everything."""
        tasks = [lookup.task for lookup in self._lookups.values()]
        self.keep(lambda _claim: False)
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        """How many look-ups are kept, those that are done included."""
        return len(self._lookups)

    def _start(self, queued: QueuedRequest, *, is_its_turn: bool) -> _Lookup:
        # A task runs only after this returns, so that it finds its look-up in place.
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
        except Exception as error:  # noqa: BLE001 - a request is answered without it rather than not at all
            log.error("context_broken", tenant=lookup.queued.tenant, error=type(error).__name__)
            found = _without(lookup.queued, Context(), RetrievalReason.UNAVAILABLE, HistoryReason.UNAVAILABLE)
            ready = with_context(lookup.queued, found)
        _count(found, lookup.known)
        if self._lookups.get(claim) is not lookup:
            return
        if lookup.on_ready is not None:
            self._drop(claim)
            lookup.on_ready(ready)
            return
        lookup.found, lookup.found_bytes = found, found.size_bytes
        self._bytes += lookup.found_bytes
        if self._bytes > self.max_kept_bytes:
            # It is looked up again when its turn has come.
            self._drop(claim)

    async def _found(self, lookup: _Lookup) -> Context:
        queued, known = lookup.queued, lookup.known
        ticket = lookup.ticket = self.gate.ticket(queued.tenant, _urgency(queued, is_its_turn=lookup.is_its_turn))
        budget_s = self._budget_s(queued)
        place: Permit | None = None
        try:
            try:
                async with asyncio.timeout(budget_s if lookup.is_its_turn else None) as lookup.timeout:
                    await ticket.granted
            except TimeoutError:
                return _without(queued, known, RetrievalReason.BUSY, HistoryReason.BUSY)
            left_s = budget_s
            if lookup.is_its_turn and (until_s := lookup.timeout.when()) is not None:
                left_s = until_s - asyncio.get_running_loop().time()
            lookup.timeout = None
            if left_s < LEAST_BUDGET_S:
                return _without(queued, known, RetrievalReason.BUSY, HistoryReason.BUSY)
            place = Permit(self.gate, ticket)
            return await self._both(lookup, place, left_s)
        finally:
            lookup.ticket = None
            if place is None:
                self.gate.leave(ticket)
            else:
                place.give_back()

    async def _both(self, lookup: _Lookup, place: Permit, budget_s: float) -> Context:
        """What it needs and does not have yet."""
        passages, history = self._passages(lookup, place, budget_s), self._history(lookup, place, budget_s)
        place.questions = sum(question is not None for question in (passages, history))
        if passages is None or history is None:
            known = lookup.known
            return Context(await passages if passages else known.passages, await history if history else known.history)
        async with asyncio.TaskGroup() as tasks:
            found, remembered = tasks.create_task(passages), tasks.create_task(history)
        return Context(found.result(), remembered.result())

    def _passages(self, lookup: _Lookup, place: Permit, budget_s: float) -> Coroutine[Any, Any, Retrieved] | None:
        queued = lookup.queued
        wanted = queued.request.retrieval
        if wanted is None or lookup.known.passages is not None or not needs_passages(queued):
            return None
        return self._retrieved(queued, wanted, place, budget_s)

    async def _retrieved(self, queued: QueuedRequest, wanted: Retrieval, place: Permit, budget_s: float) -> Retrieved:
        async with place.asking(asyncio.get_running_loop().time() + budget_s):
            return await self.retriever.retrieve(queued.tenant, wanted, query_text(queued.request), budget_s)

    def _history(self, lookup: _Lookup, place: Permit, budget_s: float) -> Coroutine[Any, Any, Remembered] | None:
        queued = lookup.queued
        conversation_id, after = queued.request.conversation_id, queued.request.conversation_after
        if conversation_id is None or lookup.known.history is not None or not needs_history(queued):
            return None
        return self.histories.remember(
            queued.tenant,
            conversation_id,
            after,
            room_for_history(queued),
            budget_s,
            lambda: lookup.is_its_turn,
            patience_s=self.budget_s,
            asking=place.asking,
        )

    def _budget_s(self, queued: QueuedRequest) -> float:
        return self.budget_s * _BACKFILL_PATIENCE if queued.is_backfill else self.budget_s


def _urgency(queued: QueuedRequest, *, is_its_turn: bool) -> Urgency:
    if not is_its_turn:
        return Urgency.WAITS
    if queued.is_backfill or queued.priority_class == Priority.LOW:
        return Urgency.TURN_LOW
    return Urgency.TURN_HIGH if queued.priority_class == Priority.HIGH else Urgency.TURN_NORMAL


def _without(queued: QueuedRequest, known: Context, passages: RetrievalReason, history: HistoryReason) -> Context:
    """What is known, and why the rest of what it needs is not."""
    wanted = queued.request.retrieval or Retrieval("")
    return Context(
        nothing(wanted.collection, passages) if known.passages is None and needs_passages(queued) else known.passages,
        Remembered(reason=history) if known.history is None and needs_history(queued) else known.history,
    )


def _count(found: Context, known: Context) -> None:
    if found.passages is not None and found.passages is not known.passages:
        use = found.passages.use
        metrics.RETRIEVALS.labels(mode=use.mode, reason=use.reason or "").inc()
    if found.history is not None and found.history is not known.history:
        metrics.HISTORIES.labels(reason=found.history.reason or "").inc()
