"""Scheduled requests awaiting enrichment: their turn has come, their context is still being looked up."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.enrichment.stage import Enrichment
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.in_flight import InFlight
from stream_processors.dispatcher.scheduling.turns import Turn

OnReady = Callable[[Turn[QueuedRequest], QueuedRequest], None]
"""Called with the turn and the enriched request, on the event loop. Must not raise."""


@dataclass(slots=True)
class AwaitingEnrichment:
    """Holds turns until enrichment ends. They count as in flight; the reservation is released if one is not
    dispatched after all."""

    enrichment: Enrichment
    in_flight: InFlight
    _waiting: dict[Claim, Turn[QueuedRequest]] = field(default_factory=dict)

    def take(self, turn: Turn[QueuedRequest], on_ready: OnReady) -> QueuedRequest | None:
        """The enriched request; None while its context is looked up, after which ``on_ready`` is called unless
        ``take_back`` removed the turn before."""

        def ready(queued: QueuedRequest) -> None:
            waiting = self._waiting.pop(queued.claim, None)
            if waiting is not None:
                on_ready(waiting, queued)

        queued = self.enrichment.enrich(turn.item, ready)
        if queued is None:
            self._waiting[turn.item.claim] = turn
        return queued

    def take_back(self, wanted: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        """Remove and return the matching requests and release their reservations: they are not dispatched."""
        taken = [turn.item for turn in self._waiting.values() if wanted(turn.item)]
        for queued in taken:
            del self._waiting[queued.claim]
            self.release(queued.claim)
        return taken

    def release(self, claim: Claim) -> None:
        """Release the in-flight reservation of a request that is not dispatched."""
        self.in_flight.release(SourceCoordinate(*claim.partition, claim.offset))

    def keep(self, is_waiting: Callable[[Claim], bool]) -> None:
        """Cancel the look-ups of requests that are neither queued (``is_waiting``) nor held here."""
        self.enrichment.keep(lambda claim: is_waiting(claim) or claim in self._waiting)
