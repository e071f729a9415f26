"""Present pool and model version of a request that was admitted, or validated, before a registry change."""

from dataclasses import dataclass, replace

from fairlane.logs import get_logger
from fairlane.ownership import Claim
from stream_processors.dispatcher.intake.validation import Rejection, within_tenant_bound
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.scheduling.cost import CostModel
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolReassignment:
    """Reassigns requests by the present registry. Nothing else of them is validated again."""

    registry: Registry
    costs: CostModel

    def as_of_now(self, queued: QueuedRequest) -> QueuedRequest | Rejection:
        """The request with its present pool and model version (the same object if unchanged), or the refusal if no pool
        serves it any more."""
        found = self.registry.serving(queued.model_name, queued.tenant)
        if isinstance(found, Rejection):
            return found
        model, pool = found
        if model == queued.model:
            return queued if pool == queued.pool else replace(queued, pool=pool)
        request = within_tenant_bound(queued.request, model, self.registry.tenants.get(queued.tenant))
        renewed = replace(queued, request=request, model=model, pool=pool)
        if not queued.input_bytes:
            # Requeued work has no known input size: its cost estimate stays.
            return renewed
        cost = self.costs.estimate(queued.tenant, model, queued.input_bytes, request.parameters.max_tokens)
        more = queued.expected_tokens
        return replace(renewed, cost_tokens=cost.total + more, prompt_tokens=cost.prompt_tokens + more)

    def reassign(self, scheduler: Scheduler[QueuedRequest]) -> list[tuple[QueuedRequest, Rejection]]:
        """Move queued requests whose pool or model version has changed to the present one, uncharged and not judged
        again. Removes and returns those that no pool serves any more, with the refusal. O(waiting)."""
        renewed: dict[Claim, QueuedRequest | Rejection] = {}

        def is_misplaced(queued: QueuedRequest) -> bool:
            now = self.as_of_now(queued)
            if now is queued:
                return False
            renewed[queued.claim] = now
            return True

        refused: list[tuple[QueuedRequest, Rejection]] = []
        taken = scheduler.take(is_misplaced)
        for queued in taken:
            now = renewed[queued.claim]
            if isinstance(now, Rejection):
                refused.append((queued, now))
            else:
                scheduler.push(now)
        if taken:
            log.info("waiting_moved", moved=len(taken) - len(refused), refused=len(refused))
        return refused
