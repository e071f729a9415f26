"""Recent request outcomes from the work feed, for duplicates whose reply cannot be looked up. Pure."""

from collections import OrderedDict
from enum import Enum, auto

from fairlane.names import is_returned
from fairlane.outcomes import Code
from stream_processors.dispatcher.scheduling.in_flight import Settled

_MAX_KNOWN = 20_000


class RecentResult(Enum):
    """The outcome of a request."""

    ANSWERED = auto()
    REFUSED_FOR_NOW = auto()
    """Rejected with a code after which the sender may retry."""


class RecentResults:
    """The latest outcomes by tenant and request id, at most ``max_known``."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[tuple[str, str], RecentResult] = OrderedDict()

    def note(self, settled: Settled) -> None:
        """Record the outcome of settled work. A requeued item settles as OVERLOADED although its request goes on, so
        that code counts only for an item read from a requeue topic, which consumers do not requeue again."""
        usage = settled.usage
        if usage is None:
            return
        is_refused = usage.code == Code.OVERLOADED
        if is_refused and not is_returned(settled.source.topic):
            return
        self._note(
            usage.tenant, usage.request_id, RecentResult.REFUSED_FOR_NOW if is_refused else RecentResult.ANSWERED
        )

    def answered(self, tenant: str, request_id: str) -> None:
        """Record a request answered without dispatching work."""
        self._note(tenant, request_id, RecentResult.ANSWERED)

    def _note(self, tenant: str, request_id: str, end: RecentResult) -> None:
        key = tenant, request_id
        self._known[key] = end
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def of(self, tenant: str, request_id: str) -> RecentResult | None:
        """The outcome; None if unknown."""
        return self._known.get((tenant, request_id))

    def forget(self, tenant: str, request_id: str) -> None:
        """Remove the outcome of a request that is tried again."""
        self._known.pop((tenant, request_id), None)
