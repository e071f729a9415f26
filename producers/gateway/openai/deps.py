"""Dependencies of the inference and model routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlane.clock import ClockMs, now_ms
from fairlane.records import InferenceRequest, ModelVersion
from producers.gateway.idempotency import Idempotency
from producers.gateway.identity.permission import Authenticate
from producers.gateway.ports import Submitter
from producers.gateway.publish_once import OnAccepted

KEEP_ALIVE_S = 10.0


class Catalog(Protocol):
    """Models of the deployment."""

    def models_of(self, tenant: str) -> Sequence[ModelVersion]:
        """Models that this tenant may use, in any order."""
        ...


def _nobody(_tenant: str, _request: InferenceRequest) -> None:
    pass


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    """Dependencies of ``router``.

    Attributes:
        submitter: publishes requests and waits for replies.
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        catalog: models by tenant.
        idempotency: deduplicates calls by key.
        wait_s: longest wait of a call for its answer, and of a stream for its next piece.
        keep_alive_s: longest silence of a stream before a keep-alive. The status of a stream is held back as long, so
            that a request that fails by then gets an error status.
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
