"""Dependencies of the native routes, and their permission checks."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from fairlane.names import is_request_id
from producers.gateway.identity.identity import Authenticate
from producers.gateway.pipeline.call_context import current
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot
from producers.gateway.pipeline.pending import PendingReply
from producers.gateway.results.results import Results
from producers.gateway.sending import SendingDeps
from producers.gateway.tenant_bounds import TenantMap, TenantSlots
from producers.openai_api.errors import GatewayError

KEEP_S = 60.0
MOST_KEPT = 1_000


class KeptStreams:
    """At most ``most``; beyond it, the tenant with the most loses its oldest: the reply still has the whole text. For
    one event loop."""

    def __init__(self, most: int = MOST_KEPT, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._kept: TenantMap[tuple[PendingReply, asyncio.TimerHandle]] = TenantMap(most)

    def keep(self, waiting: PendingReply) -> None:
        """Keep a text until it is claimed, at most ``keep_s``."""
        key = waiting.tenant, waiting.request_id
        self._drop(key)
        timer = asyncio.get_running_loop().call_later(self._keep_s, self._drop, key)
        _forget(self._kept.put(waiting.tenant, key, (waiting, timer)))

    def claim(self, tenant: str, request_id: str) -> PendingReply | None:
        """The kept waiter of this request, or None; the caller must ``forget`` it in the end."""
        kept = self._kept.pop((tenant, request_id))
        if kept is None:
            return None
        waiting, timer = kept
        timer.cancel()
        return waiting

    def close(self) -> None:
        """Drop all texts."""
        for key in tuple(self._kept):
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        _forget(self._kept.pop(key))


def _forget(kept: "tuple[PendingReply, asyncio.TimerHandle] | None") -> None:
    if kept is not None:
        waiting, timer = kept
        timer.cancel()
        waiting.forget()


UNKNOWN_REQUEST = "unknown_request"
"""The gateway's own code, like the next: no request of this tenant has this id."""
RESULT_EXPIRED, RESULT_ERASED = "result_expired", "result_erased"
TOO_MANY_STREAMS = "too_many_streams"
MOST_STREAMS = 10_000
_RETRY_AFTER_MS = 5_000


def event_slots(most: int = MOST_STREAMS) -> TenantSlots:
    """Limit on all event streams; one tenant may hold half of it."""
    return TenantSlots(most, max(1, most // 2), _full)


def _full() -> GatewayError:
    message = "as many event streams are open as may be"
    return GatewayError(429, TOO_MANY_STREAMS, message, retry_after_ms=_RETRY_AFTER_MS)


@dataclass(frozen=True, slots=True)
class EventPolicy:
    """Timing of event streams.

    Attributes:
        ping_s: longest silence on a stream.
        longest_s: longest duration of one stream; its client may reconnect.
        first_look_s: delay before the first lookup in Redis of a reply that another instance read.
        longest_look_s: longest delay between two lookups, unless ``looks_per_s`` needs a longer one.
        looks_per_s: lookups per second of all streams together.
        status_every: one of so many lookups asks Postgres for the status.
        check_s: approximate interval between checks of the caller's identity while a stream is open.
    """

    ping_s: float = 15.0
    longest_s: float = 3_600.0
    first_look_s: float = 0.25
    longest_look_s: float = 2.0
    looks_per_s: float = 100.0
    status_every: int = 4
    check_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDeps(SendingDeps):
    """Dependencies of the routes. ``identify`` is as ``authenticate``, without counting a call; None: ``authenticate``.
    ``kept`` are streamed texts that no client reads yet. ``ending`` is set when the gateway drains."""

    results: Results
    registry: Callable[[], RegistrySnapshot] = RegistrySnapshot
    load: LatestLoad = field(default_factory=LatestLoad)
    identify: Authenticate | None = None
    events: EventPolicy = field(default_factory=EventPolicy)
    slots: TenantSlots = field(default_factory=event_slots)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    kept: KeptStreams = field(default_factory=KeptStreams)


def unknown_request() -> GatewayError:
    """404: no such request, or another tenant's; the error does not say which."""
    return GatewayError(404, UNKNOWN_REQUEST, "there is no request with this id")


def result_gone(deps: NativeDeps, request_id: str, *, is_erased: bool = False) -> GatewayError:
    """404: the request is known, its result is not kept any more."""
    if is_erased:
        return GatewayError(404, RESULT_ERASED, "the result was erased", request_id=request_id)
    hours = deps.results.kept_ms / 3_600_000
    return GatewayError(404, RESULT_EXPIRED, f"results are kept for {hours:g} hours", request_id=request_id)


def checked_id(request_id: str) -> str:
    """The id, recorded for the access log. Raises GatewayError: 404 for an id that no request can have."""
    if not is_request_id(request_id):
        raise unknown_request()
    current().request_id = request_id
    return request_id
