"""A tenant's word that it does not want an answer any more. Pure."""

from dataclasses import dataclass

from fairlane.ownership import Claim
from stream_processors.dispatcher.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """A valid cancel: ``claim`` is its own record, ``tenant`` its topic's, ``requested_at_ms`` the broker's time."""

    claim: Claim
    tenant: str
    request_id: str
    requested_at_ms: int

    def concerns(self, queued: QueuedRequest) -> bool:
        """Whether it means this request: the same tenant's, of that id, and sent before it. Who sends an id again after
        a cancel wants it again."""
        if (queued.tenant, queued.request_id) != (self.tenant, self.request_id):
            return False
        source = queued.source
        if (source.topic, source.partition) == self.claim.partition:
            return source.offset < self.claim.offset
        return queued.submitted_at_ms <= self.requested_at_ms
