"""A tenant's valid request to cancel an earlier request. Pure."""

from dataclasses import dataclass

from fairlane.ownership import Claim
from stream_processors.dispatcher.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """A valid cancel. ``claim`` is of the cancel's own record, ``tenant`` that of its topic, ``requested_at_ms`` its
    broker timestamp."""

    claim: Claim
    tenant: str
    request_id: str
    requested_at_ms: int

    def concerns(self, queued: QueuedRequest) -> bool:
        """Whether it cancels this request: same tenant and id, and sent before the cancel. An id sent again after its
        cancel is a new request."""
        if (queued.tenant, queued.request_id) != (self.tenant, self.request_id):
            return False
        source = queued.source
        if (source.topic, source.partition) == self.claim.partition:
            return source.offset < self.claim.offset
        return queued.submitted_at_ms <= self.requested_at_ms
