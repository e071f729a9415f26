"""How requests ended of late, as the work feed told. Pure; it answers for what no archive can be asked about."""

from collections import OrderedDict
from enum import Enum, auto

from fairlane.names import is_returned
from fairlane.outcomes import Code
from stream_processors.dispatcher.scheduling.in_flight import Settled

_MAX_KNOWN = 20_000


class End(Enum):
    """What a consumer made of a request."""

    ANSWERED = auto()
    REFUSED_FOR_NOW = auto()
    """Its sender was told to come again."""


class RecentEnds:
    """The latest ends, by tenant and request id."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[tuple[str, str], End] = OrderedDict()

    def note(self, settled: Settled) -> None:
        """Work is done. Work that is handed back has the usage of a refusal, and is under way again."""
        usage = settled.usage
        if usage is None:
            return
        is_refused = usage.code == Code.OVERLOADED
        if is_refused and not is_returned(settled.source.topic):
            return
        self._note(usage.tenant, usage.request_id, End.REFUSED_FOR_NOW if is_refused else End.ANSWERED)

    def answered(self, tenant: str, request_id: str) -> None:
        """It was answered for good, without any work."""
        self._note(tenant, request_id, End.ANSWERED)

    def _note(self, tenant: str, request_id: str, end: End) -> None:
        key = tenant, request_id
        self._known[key] = end
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def of(self, tenant: str, request_id: str) -> End | None:
        """None when nothing is known of it."""
        return self._known.get((tenant, request_id))

    def forget(self, tenant: str, request_id: str) -> None:
        """It is tried again."""
        self._known.pop((tenant, request_id), None)
