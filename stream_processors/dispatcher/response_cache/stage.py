"""Response cache stage with coalescing, before admission."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from fairlane.logs import get_logger
from fairlane.outcomes import CacheMode, Decision
from fairlane.ownership import Claim
from fairlane.records import Cost, SourceCoordinate
from fairlane.schema_registry import RegistryError
from fairlane_server.caching.entries import CacheKey
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from stream_processors.dispatcher.admission.stage import AdmissionInbox
from stream_processors.dispatcher.deduplication.duplicates import RecentResult, RecentResults
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.queued_request import Candidate, QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.response_cache.lookup import CacheHit, CacheLookup, CacheQuery
from stream_processors.dispatcher.scheduling.in_flight import SettledWork
from stream_processors.dispatcher.scheduling.tenant_occupancy import RequestIndex

log = get_logger(__name__)

_TENANTS_THAT_SHARE = 4
"""One tenant may use at most 1/4 of the held requests, of their bytes, and of the leaders."""

_PART_OF_TIME = 0.5
"""Fraction of its remaining time that a request waits for the answer to an equal one."""

_STORED_WITHIN_S = 0.05
"""Delay before a second look: an answer is stored concurrently with its commit, so possibly just after that is seen."""

_REMEMBERED_S = 0.25
"""How long an ended leader is kept, since its committed answer may still be about to be stored."""

_Alike = tuple[CacheKey, str, str]
"""Cache key, cache mode and priority class. Equal requests coalesce; the latter two keep a request from waiting for a
less urgent one, or for one that accepts answers it does not."""


@dataclass(slots=True, eq=False)
class _Leader:
    """The first of equal requests, which is admitted; the others wait for its answer."""

    claim: Claim
    alike: _Alike
    question: CacheQuery
    ends_at_ms: float
    """When coalescing on it ends, whatever its outcome."""
    is_sent: bool = False
    known: CacheHit | None = None
    """Its stored answer, or one cached before."""
    left_nothing: bool = False
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tenant(self) -> str:
        return self.question.key.tenant


@dataclass(slots=True, eq=False)
class _Lookup:
    candidate: Candidate
    task: "asyncio.Task[None]"

    @property
    def queued(self) -> QueuedRequest:
        return self.candidate.queued


@dataclass(slots=True)
class ResponseCacheStage:
    """Looks up requests that opted in, concurrently with intake. A hit is answered; a miss goes to the inbox of
    admission as the leader, and equal requests arriving meanwhile wait for its answer: once, and for at most half of
    their remaining time; then they are admitted too. Backfill never leads.

    On one event loop. No method raises because of a single request.

    Attributes:
        wake: set when ``answer_hits`` has something to do.
        max_held: most requests looked up or waiting. Beyond it a request is admitted without a look-up.
        max_held_bytes: most bytes of them.
        max_wait_ms: longest wait for a leader, whatever the remaining time.
        max_leaders: most leaders.
    """

    lookup: CacheLookup
    inbox: AdmissionInbox
    registry: Registry
    output: OutputStage
    wake: asyncio.Event
    recent_results: RecentResults = field(default_factory=RecentResults)
    max_held: int = 2_048
    max_held_bytes: int = 32 * 1024 * 1024
    max_wait_ms: int = 60_000
    max_leaders: int = 8_192
    _lookups: dict[Claim, _Lookup] = field(default_factory=dict)
    _ids: RequestIndex[QueuedRequest] = field(default_factory=RequestIndex)
    _held: Counter[str] = field(default_factory=Counter)
    """Held requests by tenant."""
    _bytes: Counter[str] = field(default_factory=Counter)
    _total_bytes: int = 0
    _leading: Counter[str] = field(default_factory=Counter)
    _leaders: dict[_Alike, _Leader] = field(default_factory=dict)
    _led_by: dict[SourceCoordinate, _Leader] = field(default_factory=dict)
    """Leaders by source coordinate."""
    _hits: list[tuple[Candidate, CacheHit]] = field(default_factory=list)
    _answered: dict[Claim, QueuedRequest] = field(default_factory=dict)
    """Requests answered from the cache and not committed yet."""

    def submit(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Start look-ups. Returns the requests that did not opt in or for which there is no room: they go on to
        admission at once."""
        return [one for one in candidates if not self._begin(one)]

    def answer_hits(self) -> None:
        """Answer the hits found since the last call. A hit that cannot be used any more goes on to admission.

        Raises RegistryError while the schema registry is unavailable.
        """
        hits, self._hits = self._hits, []
        for candidate, hit in hits:
            queued, now_ms = candidate.queued, self.output.clock()
            outputs: tuple[OutputRecord, ...] | None = None
            cost: Cost | None = None
            try:
                if now_ms <= queued.deadline_at_ms and self._may_use(queued, hit):
                    cost = self.output.writer.cost_of_cached(hit, now_ms)
                    verdict = self.output.budgets.admit_cached(queued, 0 if cost is None else cost.nanos, now_ms)
                    if not verdict.is_refusal:
                        noticed = replace(queued, budget=verdict.soft)
                        outputs = self.output.writer.cached(noticed, hit, cost, now_ms)
            except RegistryError:
                raise
            except Exception as error:  # noqa: BLE001 - the cached answer is unusable: the request is admitted
                log.error("earlier_answer_unusable", tenant=queued.tenant, error=type(error).__name__)
            if outputs is None:
                self.inbox.put(candidate)
                continue
            self._answered[queued.claim] = queued
            self.output.counts.decided(queued.tenant, Decision.CACHED)
            self.output.counts.cost(queued.tenant, hit.answer.model, cost)
            self.output.transactions.submit(Settlement(queued.claim, outputs))

    def held(self) -> list[QueuedRequest]:
        return [lookup.queued for lookup in self._lookups.values()]

    def find(self, tenant: str, request_id: str) -> tuple[QueuedRequest, ...]:
        return self._ids.find(tenant, request_id)

    def drop(self, claims: Iterable[Claim]) -> None:
        """Cancel these look-ups and end these leaders: answered elsewhere, or their partitions were revoked."""
        for claim in claims:
            if claim in self._lookups:
                self._take(claim).task.cancel()
            self._end(self._led_by.get(_place(claim)))

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop requests of revoked partitions: their new owner reads them again."""
        held = (*self._lookups, *(leader.claim for leader in self._led_by.values()))
        self.drop([claim for claim in held if not is_current(claim)])
        self._hits = [hit for hit in self._hits if is_current(hit[0].claim)]
        self._answered = {claim: queued for claim, queued in self._answered.items() if is_current(claim)}

    def sent(self, claim: Claim) -> None:
        """Note a dispatched leader: it now ends when its work is settled, not when its source record is."""
        leader = self._led_by.get(_place(claim))
        if leader is not None and not leader.is_sent:
            leader.is_sent = True
            self.lookup.remember(leader.question)

    def committed(self, claims: Iterable[Claim]) -> None:
        """Note the answers among these committed claims, and end the leaders that were not dispatched."""
        if self._led_by or self._answered:
            for claim in claims:
                answered = self._answered.pop(claim, None)
                if answered is not None:
                    self.recent_results[answered.tenant, answered.request_id] = RecentResult.ANSWERED
                leader = self._led_by.get(_place(claim))
                if leader is not None and not leader.is_sent:
                    self._end(leader)

    def settled(self, settled: SettledWork) -> None:
        """Note the result, and end the leader of this work, which is done or was requeued."""
        self.recent_results.note(settled)
        self._end(self._led_by.get(settled.source))

    def sweep(self) -> None:
        """End leaders past their ``ends_at_ms``. Call it periodically."""
        now_ms = self.output.clock()
        for leader in [leader for leader in self._leaders.values() if leader.ends_at_ms < now_ms]:
            self._end(leader)

    async def close(self) -> None:
        tasks = [lookup.task for lookup in self._lookups.values()]
        self.discard(lambda _claim: False)
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._lookups)

    def _begin(self, candidate: Candidate) -> bool:
        queued = candidate.queued
        if queued.cache == CacheMode.NONE or not self.lookup.is_available or not self._has_room(queued):
            return False
        task = asyncio.get_running_loop().create_task(self._run(queued.claim), name="response cache")
        self._lookups[queued.claim] = _Lookup(candidate, task)
        self._ids.add(queued)
        self._count(queued, 1)
        return True

    def _may_use(self, queued: QueuedRequest, hit: CacheHit) -> bool:
        """Whether this tenant may get the cached answer now: same model version, within its prompt bound."""
        now, answer = self.registry.as_of_now(queued, self.output.clock()), hit.answer
        if isinstance(now, Rejection) or (now.model.model, now.model.version) != (answer.model, answer.model_version):
            return False
        most = now.max_prompt_tokens
        return most is None or answer.usage.prompt_tokens <= most

    async def _run(self, claim: Claim) -> None:
        lookup = self._lookups[claim]
        known: CacheHit | None = None
        try:
            known = await self._known(lookup.queued)
        except Exception as error:  # noqa: BLE001 - a request is answered anew rather than not at all
            log.error("earlier_answer_broken", tenant=lookup.queued.tenant, error=type(error).__name__)
        if self._lookups.get(claim) is lookup:
            self._take(claim)
            if known is None:
                self.inbox.put(lookup.candidate)
            else:
                self._hits.append((lookup.candidate, known))
                self.wake.set()

    async def _known(self, queued: QueuedRequest) -> CacheHit | None:
        question = await self.lookup.question(queued)
        if question is None:
            return None
        alike = question.key, queued.cache, queued.priority_class
        leader = self._leaders.get(alike)
        if leader is not None:
            return await self._after(leader, queued)
        # From here on equal requests wait for this one: a single look-up serves all of them.
        leader = self._lead(queued, alike, question)
        known = await self.lookup.find(question)
        if known is not None and leader is not None:
            leader.known = known
            self._end(leader)
        return known

    async def _after(self, leader: _Leader, queued: QueuedRequest) -> CacheHit | None:
        """Wait for the leader's end, then return its stored answer. Without one, waiters are admitted and do not wait
        for another leader: equal requests with uncacheable answers would run one after the other."""
        left_ms = min(self.max_wait_ms, _PART_OF_TIME * (queued.deadline_at_ms - self.output.clock()))
        try:
            async with asyncio.timeout(max(0.0, left_ms / 1_000)):
                await leader.ended.wait()
        except TimeoutError:
            return None
        async with leader.looking:
            # One look-up for all waiters.
            if leader.known is None and leader.is_sent and not leader.left_nothing:
                leader.known = await self._stored(leader.question)
                leader.left_nothing = leader.known is None
        return leader.known

    async def _stored(self, question: CacheQuery) -> CacheHit | None:
        known = await self.lookup.find(question)
        if known is None:
            await asyncio.sleep(_STORED_WITHIN_S)
            known = await self.lookup.find(question)
        return known

    def _lead(self, queued: QueuedRequest, alike: _Alike, question: CacheQuery) -> _Leader | None:
        tenant = queued.tenant
        is_full = len(self._leaders) >= self.max_leaders or self._leading[tenant] >= _part_of(self.max_leaders)
        if is_full or queued.is_backfill:
            return None
        ends_at_ms = min(queued.deadline_at_ms, self.output.clock() + self.max_wait_ms)
        leader = _Leader(queued.claim, alike, question, ends_at_ms)
        self._leaders[alike] = self._led_by[_place(queued.claim)] = leader
        self._leading[tenant] += 1
        return leader

    def _end(self, leader: _Leader | None) -> None:
        if leader is None or leader.ended.is_set():
            return
        leader.ended.set()
        if leader.is_sent:
            asyncio.get_running_loop().call_later(_REMEMBERED_S, self._forget, leader)
        else:
            self._forget(leader)

    def _forget(self, leader: _Leader) -> None:
        """Remove a leader. Another may have replaced it under its key, or at its coordinate if its partition was
        revoked and reassigned."""
        if self._leaders.get(leader.alike) is leader:
            del self._leaders[leader.alike]
        if self._led_by.get(_place(leader.claim)) is leader:
            del self._led_by[_place(leader.claim)]
        _subtract(self._leading, leader.tenant, 1)

    def _has_room(self, queued: QueuedRequest) -> bool:
        tenant, size_bytes = queued.tenant, queued.size_bytes
        return (
            len(self._lookups) < self.max_held
            and self._held[tenant] < _part_of(self.max_held)
            and self._total_bytes + size_bytes <= self.max_held_bytes
            and self._bytes[tenant] + size_bytes <= _part_of(self.max_held_bytes)
        )

    def _take(self, claim: Claim) -> _Lookup:
        lookup = self._lookups.pop(claim)
        self._ids.remove(lookup.queued)
        self._count(lookup.queued, -1)
        return lookup

    def _count(self, queued: QueuedRequest, sign: int) -> None:
        self._total_bytes += sign * queued.size_bytes
        _subtract(self._held, queued.tenant, -sign)
        _subtract(self._bytes, queued.tenant, -sign * queued.size_bytes)


def _part_of(most: int) -> int:
    return max(1, most // _TENANTS_THAT_SHARE)


def _subtract(counts: Counter[str], tenant: str, amount: int) -> None:
    """Subtract and delete zero counts, since tenants come and go."""
    counts[tenant] -= amount
    if not counts[tenant]:
        del counts[tenant]


def _place(claim: Claim) -> SourceCoordinate:
    return claim.coordinate
