"""Work that a consumer holds and does not run: new items, and items to be retried. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from inference_consumers.batching.micro_batch import MicroBatch, MicroBatcher
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.engine_process.states import EngineStates
from inference_consumers.results.retries import Again, PendingRetries


@dataclass(slots=True)
class WaitingWork:
    """New items in the micro-batcher, and items to be retried. One thread at a time."""

    batcher: MicroBatcher
    retries: PendingRetries = field(default_factory=PendingRetries)

    def add(self, work: ReceivedWork) -> None:
        self.batcher.add(work)

    def add_again(self, again: Sequence[Again]) -> None:
        self.retries.add(again)

    def __len__(self) -> int:
        return len(self.batcher) + len(self.retries)

    @property
    def cost_tokens(self) -> int:
        return self.batcher.cost_tokens + self.retries.cost_tokens

    def discard_stale(self, is_current: Callable[[Claim], bool]) -> int:
        """Drop work whose partition moved on; its new owner reads it again. Returns how many."""
        return len(self.take(lambda work: not is_current(work.claim)))

    def take_expired(self, now_ms: int) -> list[ReceivedWork]:
        again = self.retries.take(lambda work: work.item.deadline_at_ms < now_ms)
        return [*self.batcher.take_expired(now_ms), *again]

    @property
    def waiting_models(self) -> set[ModelKey]:
        """The versions that something waits for."""
        return self.retries.waiting_models.union(self.batcher.waiting_models)

    def take(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        return [*self.batcher.take(condition), *self.retries.take(condition)]

    def take_request(
        self, tenant: str, request_id: str, condition: Callable[[ReceivedWork], bool]
    ) -> list[ReceivedWork]:
        """Remove the work of a request that meets the condition, mostly none: that costs little."""
        held = self.batcher.take(condition) if self.batcher.holds(tenant, request_id) else []
        return [*held, *self.retries.take(condition)]

    def pick(self, now_ms: int, engines: EngineStates, *, idle: bool) -> MicroBatch | None:
        """What to run now; None when no engine has room for anything that waits, or it pays to wait for more.

        What must run alone keeps its engine free of other work from the moment it is due.
        """
        runnable = engines.runnable()
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
        runnable = engines.runnable()
        # What fits into a continuous engine was picked; for more it takes something that ends.
        batched = {key for key in runnable if not engines.by_key[key].is_continuous}
        times = (
            self.retries.due_at_ms(runnable, engines.idle(runnable)),
            self.batcher.due_at_ms(idle=idle, runnable=batched),
        )
        return min((at_ms for at_ms in times if at_ms is not None), default=None)
