"""Requests whose turn has come while what they are to be answered from is still looked up."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.enrichment.enrichment import Enrichment
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.in_flight import InFlight
from stream_processors.dispatcher.scheduling.turns import Turn

OnReady = Callable[[Turn[QueuedRequest], QueuedRequest], None]
"""Told the turn and the request with its context, on the event loop. Must not raise."""


@dataclass(slots=True)
class ContextTurns:
    """They count as in flight: what was reserved for them is released when they are not sent after all."""

    enrichment: Enrichment
    in_flight: InFlight
    _waiting: dict[Claim, Turn[QueuedRequest]] = field(default_factory=dict)

    def take(self, turn: Turn[QueuedRequest], on_ready: OnReady) -> QueuedRequest | None:
        """The request with its context; None when that is still looked up: ``on_ready`` is told it, unless the turn is
        taken back before."""

        def ready(queued: QueuedRequest) -> None:
            waiting = self._waiting.pop(queued.claim, None)
            if waiting is not None:
                on_ready(waiting, queued)

        queued = self.enrichment.enrich(turn.item, ready)
        if queued is None:
            self._waiting[turn.item.claim] = turn
        return queued

    def take_back(self, wanted: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        """Those of them that are wanted are sent to nobody, and wait here no longer."""
        taken = [turn.item for turn in self._waiting.values() if wanted(turn.item)]
        for queued in taken:
            del self._waiting[queued.claim]
            self.release(queued.claim)
        return taken

    def release(self, claim: Claim) -> None:
        """What was reserved for this one is not sent."""
        self.in_flight.release(SourceCoordinate(*claim.partition, claim.offset))

    def keep(self, is_waiting: Callable[[Claim], bool]) -> None:
        """Look up nothing for others than those that wait for their turn, and those here."""
        self.enrichment.keep(lambda claim: is_waiting(claim) or claim in self._waiting)
