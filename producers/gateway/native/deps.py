"""Dependencies of the native routes, and their permission checks."""

from dataclasses import dataclass, field

from fairlane.clock import ClockMs, now_ms
from fairlane.names import is_request_id
from fairlane_server.api_keys.api_key import Scope
from producers.gateway.idempotency import Idempotency
from producers.gateway.identity.identity import Authenticate, Identity, permit
from producers.gateway.native.errors import unknown_request
from producers.gateway.native.event_slots import EventSlots
from producers.gateway.native.unclaimed_streams import KeptStreams
from producers.gateway.pipeline.call_context import note_request
from producers.gateway.ports import Submitter
from producers.gateway.results.results import Results


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


@dataclass(frozen=True, slots=True)
class NativeDeps:
    """Dependencies of the routes.

    Attributes:
        submitter: publishes to Kafka.
        authenticate: FastAPI dependency for HTTP and WebSockets that returns the identity; raises GatewayError.
        identify: the same without counting a call; None: ``authenticate``.
        results: replies and statuses; opened and closed by the application.
        idempotency: deduplicates calls by key.
        wait_s: longest that a call waits for its answer.
        clock_ms: milliseconds since the epoch.
        events: timing of event streams.
        slots: limit on open event streams.
        kept: streamed texts that no client reads yet.
    """

    submitter: Submitter
    authenticate: Authenticate
    results: Results
    idempotency: Idempotency
    wait_s: float
    clock_ms: ClockMs = now_ms
    events: EventPolicy = field(default_factory=EventPolicy)
    slots: EventSlots = field(default_factory=EventSlots)
    kept: KeptStreams = field(default_factory=KeptStreams)
    identify: Authenticate | None = None


def require_send(identity: Identity) -> None:
    """Raises GatewayError: 403 if this caller may not send and cancel requests."""
    permit(identity, Scope.INFERENCE, writes=True)


def may_read(identity: Identity) -> None:
    """Raises GatewayError: 403 if this caller may not read requests and results."""
    permit(identity, Scope.RESULTS)


def checked_id(request_id: str) -> str:
    """The id, recorded for the access log. Raises GatewayError: 404 for an id that no request can have."""
    if not is_request_id(request_id):
        raise unknown_request()
    note_request(request_id)
    return request_id
