"""What these routes need of the rest of the gateway."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlane.clock import ClockMs, now_ms
from fairlane.records import InferenceRequest, ModelVersion
from producers.gateway.idempotency import Idempotency
from producers.gateway.identity.permission import Authenticate
from producers.gateway.publish_once import OnAccepted
from producers.gateway.seams import Submitter

KEEP_ALIVE_S = 10.0


class Catalog(Protocol):
    """Which models there are."""

    def models_of(self, tenant: str) -> Sequence[ModelVersion]:
        """Those that this tenant may use, in any order."""
        ...


def _nobody(_tenant: str, _request: InferenceRequest) -> None:
    pass


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    """What ``router`` takes.

    Attributes:
        submitter: the way into the log and back.
        authenticate: a dependency of FastAPI: who asks; raises GatewayError.
        catalog: the models.
        idempotency: the calls that have a key.
        wait_s: longest a call waits for its answer, and a stream for its next piece.
        keep_alive_s: how long a stream may be silent; also how long the status of a stream is held back, so that a
            request that is refused soon is refused with a status of its own.
        clock_ms: milliseconds since the epoch.
        on_accepted: see ``publish_once``.
    """

    submitter: Submitter
    authenticate: Authenticate
    catalog: Catalog
    idempotency: Idempotency
    wait_s: float
    keep_alive_s: float = KEEP_ALIVE_S
    clock_ms: ClockMs = now_ms
    on_accepted: OnAccepted = _nobody
