"""What the native routes need, and what every one of them asks of its caller."""

from dataclasses import dataclass, field

from fairlane.clock import ClockMs, now_ms
from fairlane.names import is_request_id
from fairlane_server.api_keys.roles import Scope
from producers.gateway.idempotency import Idempotency
from producers.gateway.identity.permission import Authenticate, permit
from producers.gateway.identity.principal import Identity
from producers.gateway.native.errors import unknown_request
from producers.gateway.native.event_slots import EventSlots
from producers.gateway.native.kept_streams import KeptStreams
from producers.gateway.pipeline.caller import note_request
from producers.gateway.results.results import Results
from producers.gateway.seams import Submitter


@dataclass(frozen=True, slots=True)
class EventPolicy:
    """How events are told.

    Attributes:
        ping_s: the longest that nothing is sent.
        longest_s: of one stream; whoever wants more comes again.
        first_look_s: before Redis is first asked for a reply that came elsewhere; then at most
        longest_look_s: between two looks, or as long as keeps all streams together to
        looks_per_s: a second.
        status_every: of so many looks one asks Postgres how it stands.
        check_s: about how long a caller's identity is believed while a stream is open.
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
    """What the routes are made of.

    Attributes:
        submitter: the way into the log.
        authenticate: a dependency of FastAPI for HTTP and WebSockets: who calls; raises GatewayError.
        identify: the same where it is no call of its own; None: as ``authenticate``.
        results: what became of requests; opened and closed by the application.
        idempotency: of calls with a key.
        wait_s: longest that a call waits for its answer.
        clock_ms: milliseconds since the epoch.
        events: how events are told.
        slots: of event streams that are open.
        kept: texts that nobody reads yet.
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


def may_send(identity: Identity) -> None:
    """Raises GatewayError: 403, this caller may not send work, nor cancel it."""
    permit(identity, Scope.INFERENCE, writes=True)


def may_read(identity: Identity) -> None:
    """Raises GatewayError: 403, this caller may not read requests and results."""
    permit(identity, Scope.RESULTS)


def checked_id(request_id: str) -> str:
    """The id, which the log of calls has from here on. Raises GatewayError: 404, no request can have it."""
    if not is_request_id(request_id):
        raise unknown_request()
    note_request(request_id)
    return request_id
