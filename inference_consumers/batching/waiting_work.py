"""Work that a consumer holds and does not run: new items, items to be retried, and copies for evaluation. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatch, MicroBatcher
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.engine_process.states import EngineStates
from inference_consumers.results.retries import Again, PendingRetries


@dataclass(slots=True)
class WaitingWork:
    """New items in the micro-batcher, and items to be retried. One thread at a time.

    Copies for evaluation wait apart: they are in no batch with requests, and nothing is learned from their runs about
    those of requests. One runs when no request waits.
    """

    batcher: MicroBatcher
    retries: PendingRetries = field(default_factory=PendingRetries)
    copies: "WaitingWork | None" = None
    """None where copies themselves wait."""

    def add(self, work: ReceivedWork) -> None:
        self._lane(work).batcher.add(work)

    def add_again(self, again: Sequence[Again]) -> None:
        for one in again:
            self._lane(one.work[0]).retries.add((one,))

    def __len__(self) -> int:
        return self.requests + (0 if self.copies is None else len(self.copies))

    @property
    def requests(self) -> int:
        """The number of items that are no copies."""
        return len(self.batcher) + len(self.retries)

    @property
    def cost_tokens(self) -> int:
        return sum(lane.batcher.cost_tokens + lane.retries.cost_tokens for lane in self._lanes)

    def count(self, priority: str) -> int:
        """New items of a priority but for copies: dispatchers bound these, and they hold up no fetching of requests."""
        return self.batcher.count(priority)

    def size_bytes(self, priority: str) -> int:
        """Bytes of the new items of a priority, without copies."""
        return self.batcher.size_bytes(priority)

    def batcher_of(self, *, copies: bool) -> MicroBatcher:
        """The micro-batcher of requests, or that of copies."""
        return self.batcher if self.copies is None or not copies else self.copies.batcher

    def discard_stale(self, is_current: Callable[[Claim], bool]) -> int:
        """Drop work whose partition moved on; its new owner reads it again. Returns how many."""
        return len(self.take(lambda work: not is_current(work.claim)))

    def take_expired(self, now_ms: int) -> list[ReceivedWork]:
        expired: list[ReceivedWork] = []
        for lane in self._lanes:
            again = lane.retries.take(lambda work: work.item.deadline_at_ms < now_ms)
            expired += [*lane.batcher.take_expired(now_ms), *again]
        return expired

    @property
    def waiting_models(self) -> set[ModelKey]:
        """The versions that something waits for, copies included."""
        return {key for lane in self._lanes for key in (*lane.retries.waiting_models, *lane.batcher.waiting_models)}

    def set_limits(self, key: ModelKey, limits: BatchLimits) -> None:
        """The bounds of a version's batches, from when it is loaded."""
        for lane in self._lanes:
            lane.batcher.limits_by_model[key] = limits

    def forget(self, key: ModelKey) -> None:
        """Forget what was learned of a version that nothing waits for."""
        for lane in self._lanes:
            lane.batcher.forget(key)

    def take(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        return [work for lane in self._lanes for work in (*lane.batcher.take(condition), *lane.retries.take(condition))]

    def take_again(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        """Remove the items to be retried that meet the condition."""
        return [work for lane in self._lanes for work in lane.retries.take(condition)]

    def take_request(
        self, tenant: str, request_id: str, condition: Callable[[ReceivedWork], bool]
    ) -> list[ReceivedWork]:
        """Remove the work of a request that meets the condition, mostly none: that costs little."""
        taken: list[ReceivedWork] = []
        for lane in self._lanes:
            held = lane.batcher.take(condition) if lane.batcher.holds(tenant, request_id) else []
            taken += [*held, *lane.retries.take(condition)]
        return taken

    def pick(self, now_ms: int, engines: EngineStates, *, idle: bool) -> MicroBatch | None:
        """What to run now; None when no engine has room for anything that waits, or it pays to wait for more.

        What must run alone keeps its engine free of other work from the moment it is due.
        """
        if self.copies is None or self.requests:
            return self._pick(now_ms, engines, engines.runnable(), idle=idle)
        return self.copies._pick(now_ms, engines, engines.runnable(for_copies=True), idle=idle)

    def _pick(self, now_ms: int, engines: EngineStates, runnable: set[ModelKey], *, idle: bool) -> MicroBatch | None:
        again = self.retries.next(now_ms, runnable, engines.idle(runnable))
        if again is not None:
            return MicroBatch(again.model_key, again.work, again.alone)
        free = runnable - self.retries.waits_alone(now_ms)
        continuous = {key for key in free if engines.by_key[key].is_continuous}
        for key in continuous:
            work = self.batcher.take_for(key, now_ms, *engines.room(key))
            if work:
                return MicroBatch(key, tuple(work))
        return self.batcher.next_batch(now_ms, idle=idle, runnable=free - continuous)

    def due_at_ms(self, engines: EngineStates, *, idle: bool) -> int | None:
        """When there may be something to pick although nothing else happens; None when not."""
        if self.copies is None or self.requests:
            return self._due_at_ms(engines, engines.runnable(), idle=idle)
        return self.copies._due_at_ms(engines, engines.runnable(for_copies=True), idle=idle)

    def _due_at_ms(self, engines: EngineStates, runnable: set[ModelKey], *, idle: bool) -> int | None:
        # What fits into a continuous engine was picked; for more it takes something that ends.
        batched = {key for key in runnable if not engines.by_key[key].is_continuous}
        times = (
            self.retries.due_at_ms(runnable, engines.idle(runnable)),
            self.batcher.due_at_ms(idle=idle, runnable=batched),
        )
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    @property
    def _lanes(self) -> "tuple[WaitingWork, ...]":
        return (self,) if self.copies is None else (self, self.copies)

    def _lane(self, work: ReceivedWork) -> "WaitingWork":
        return self.copies if self.copies is not None and work.is_copy else self
