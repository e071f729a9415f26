"""Which work items a replay is about, and what it does with each. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from fairlane.records import WorkItem
from fairlane_server.log_replay.progress import ReplayCounts
from fairlane_server.models.routes import share_of


class CopyDecision(StrEnum):
    """What becomes of a sampled work item; the names are those of the counts."""

    COPIED = "copied"
    DENIED = "denied"
    ERASED = "erased"
    UNANSWERED = "unanswered"
    REPEATED = "repeated"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """The work of one version of a model. Without ``tenants`` that of all; ``sample`` is the part of the requests, from
    above 0 to 1."""

    model: str
    version: str
    tenants: Collection[str] = ()
    sample: float = 1.0

    def takes(self, item: WorkItem) -> bool:
        """Whether a replay is about this item. Work that is a copy itself is never copied."""
        return (
            item.evaluation is None
            and item.request.model == self.model
            and item.model_version == self.version
            and (not self.tenants or item.tenant in self.tenants)
            and is_sampled(item.tenant, item.request.request_id, self.sample)
        )


def is_sampled(tenant: str, request_id: str, sample: float) -> bool:
    """By a hash of tenant and request: all replays with one ``sample`` take the same requests, and one with a larger
    ``sample`` takes these and others."""
    # Salted, so that the sample does not follow from the arm that a route has chosen by the same id.
    return share_of(f"log-replay\0{tenant}\0{request_id.lower()}") < sample


def counts_of(decision: CopyDecision | None) -> ReplayCounts:
    """The counts of one work item that was read; None: the replay is not about it."""
    if decision is None:
        return ReplayCounts(read=1)
    return ReplayCounts(read=1, sampled=1, **{decision.value: 1})


def room(outstanding: int, most_outstanding: int, copied: int, most_copied: int | None, arms: int) -> int:
    """How many more requests may be copied now. ``outstanding``: copies without a result, of which there may be
    ``most_outstanding``; a request has ``arms`` copies."""
    free = max(0, most_outstanding - outstanding) // arms
    return free if most_copied is None else min(free, max(0, most_copied - copied))
