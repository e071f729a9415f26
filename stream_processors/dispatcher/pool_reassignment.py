"""Pool reassignment of queued requests after a registry change."""

from fairlane.logs import get_logger
from fairlane.ownership import Claim
from stream_processors.dispatcher.intake.stage import Intake
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

log = get_logger(__name__)


def reassign_queued(scheduler: Scheduler[QueuedRequest], intake: Intake) -> list[tuple[QueuedRequest, Rejection]]:
    """Move queued requests whose pool or model version has changed to the present one, uncharged and not judged again.
    Removes and returns those that no pool serves any more, with the refusal. O(waiting)."""
    renewed: dict[Claim, QueuedRequest | Rejection] = {}

    def is_misplaced(queued: QueuedRequest) -> bool:
        now = intake.as_of_now(queued)
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
