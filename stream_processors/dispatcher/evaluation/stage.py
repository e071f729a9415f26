"""Evaluation stage: copies of dispatched requests for a shadow, and the copies that wait here for an idle pool.

Each copy that is read ends in exactly one settlement: its work item, or its reply when it is too late, not served, or
not allowed any more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.names import EVALUATION_WORK
from fairlane.outcomes import Code, Decision
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.records import UsageEvent
from fairlane_server.admission_rule import CapacityState
from fairlane_server.kafka.transactions import Settlement
from stream_processors.dispatcher.admission.degradation import Ladder
from stream_processors.dispatcher.evaluation.sampling import Pressure, Sampled, ShadowSampler
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.queued_request import Candidate, QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.scheduling.copy_queue import CopyQueue
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, Turn

MOST_WAITING = 2_000
"""Copies that wait here; their topic is not read while there are more. Also its bytes are bounded."""
MOST_WAITING_BYTES = 64 * 1024 * 1024

_UNLOADED_MS = 300_000
"""How long a copy waits for a version that no consumer has loaded: longer than an engine takes to start."""


@dataclass(slots=True)
class EvaluationStage:
    """Runs on the event loop. A single copy never raises."""

    ownership: Ownership
    classifier: RecordClassifier
    registry: Registry
    scheduler: Scheduler[QueuedRequest]
    ladder: Ladder
    output: OutputStage
    copies: CopyQueue[QueuedRequest] = field(default_factory=CopyQueue)
    sampler: ShadowSampler = field(default_factory=ShadowSampler)
    _unloaded_since_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    """By pool and version that copies wait for."""
    _shown_pools: set[tuple[str]] = field(default_factory=set)

    # Copies that are made here

    def sample(self, queued: QueuedRequest, now_ms: int) -> Sampled | None:
        """What a shadow of its model makes of a request that is dispatched now; None if it is in no sample."""
        route = self.registry.models.routes.get(queued.model_name)
        shadow = None if route is None else route.shadow
        if shadow is None:
            return None
        candidate = self.registry.models.versions.get((queued.model_name, shadow.candidate))
        pool = None if candidate is None else self.registry.pool_for(candidate, queued.tenant)
        is_loaded = (
            candidate is not None
            and isinstance(pool, str)
            and not self.registry.models.is_stopped(candidate)
            and bool(self.registry.served(candidate, queued.tenant))
        )
        sampled = self.sampler.sample(
            queued,
            shadow,
            now_ms,
            is_allowed=self.registry.allows_evaluation(queued.tenant),
            is_loaded=is_loaded,
            pressure=lambda: self._pressure(str(pool), queued, now_ms),
        )
        if sampled is not None:
            metrics.SHADOW_SAMPLED.labels(model=queued.model_name, result=sampled.result).inc()
        return sampled

    def _pressure(self, pool: str, queued: QueuedRequest, now_ms: int) -> Pressure:
        capacity = self.scheduler.capacity.pool(pool, now_ms)
        is_under_load = (
            capacity.state is not CapacityState.LIVE
            or bool(queued.degradations)
            or self.ladder.is_degrading(pool, now_ms)
            or self.scheduler.queue_ms(pool) > self.scheduler.policy.target_queue_ms
        )
        return Pressure(is_under_load, capacity.cost_tokens_per_s, self.scheduler.fleet.dispatchers(now_ms))

    def learn(self, usage: UsageEvent) -> None:
        """A copy has run, wherever it was made."""
        self.sampler.ended(usage.request_id)

    # Copies that wait here

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue the copies, or answer them."""
        for candidate in candidates:
            if not self.ownership.is_current(candidate.claim):
                continue
            try:
                now_ms = self.output.clock()
                now = self.registry.as_of_now(candidate.queued, now_ms)
                if isinstance(now, Rejection):
                    self._refuse(candidate.queued, now, now_ms)
                elif now_ms > now.deadline_at_ms:
                    self._drop(now, now_ms)
                else:
                    self.copies.push(now)
            except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                outputs = self.classifier.broken(candidate.record, error)
                self.output.transactions.submit(Settlement(candidate.claim, outputs))

    def turns(self, now_ms: int) -> Iterator[Turn[QueuedRequest]]:
        """Copies that may be dispatched now, each reserved in flight when it is yielded."""
        if len(self.copies):
            yield from self.scheduler.spare_turns(self.copies, now_ms)

    def reassign(self, now_ms: int) -> None:
        """Move waiting copies as ``Registry.reassign`` says, and answer those that nothing serves any more."""
        for queued, refusal in self.registry.reassign(self.copies, now_ms):
            self._refuse(queued, refusal, now_ms)

    def sweep(self, now_ms: int) -> None:
        """Answer copies that have waited too long. Call it periodically."""
        if len(self.copies):
            for queued in self.copies.take(lambda one: now_ms > one.deadline_at_ms):
                self._drop(queued, now_ms)
            self._refuse_unloaded(now_ms)
        waiting = {(pool,): float(self.copies.count(pool)) for pool in self.copies.pools()}
        self._shown_pools = metrics.show(metrics.COPIES_WAITING, waiting, self._shown_pools)

    def paused(self, owned: Sequence[PartitionId]) -> set[PartitionId]:
        """The partitions of copies to pause: enough of them wait here."""
        if len(self.copies) < MOST_WAITING and self.copies.size_bytes < MOST_WAITING_BYTES:
            return set()
        return {partition for partition in owned if partition.topic == EVALUATION_WORK}

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop the copies of revoked partitions; their new owner reads them again."""
        self.copies.take(lambda one: not is_current(one.claim))

    def _refuse_unloaded(self, now_ms: int) -> None:
        since_ms: dict[tuple[str, str], int] = {}
        for pool in self.copies.pools():
            for head in self.copies.heads(pool):
                if not self.registry.served(head.model, head.owner):
                    key = pool, head.version_key
                    since_ms[key] = self._unloaded_since_ms.get(key, now_ms)
        self._unloaded_since_ms = since_ms
        overdue = {key for key, since in since_ms.items() if now_ms - since >= _UNLOADED_MS}
        if overdue:
            for queued in self.copies.take(lambda one: (one.pool, one.version_key) in overdue):
                reason = f"no consumer has loaded version {queued.model.version} of {queued.model_name}"
                self._refuse(queued, Rejection(Code.UNKNOWN_MODEL, "model", reason), now_ms)

    def _refuse(self, queued: QueuedRequest, refusal: Rejection, now_ms: int) -> None:
        self.output.counts.decided(queued.tenant, Decision.REFUSED, refusal.code)
        outputs = self.output.writer.not_served(queued, refusal, now_ms)
        self.output.transactions.submit(Settlement(queued.claim, outputs))

    def _drop(self, queued: QueuedRequest, now_ms: int) -> None:
        self.output.counts.decided(queued.tenant, Decision.EXPIRED)
        self.output.transactions.submit(Settlement(queued.claim, self.output.writer.late(queued, None, now_ms)))
