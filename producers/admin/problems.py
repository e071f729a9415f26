"""Errors of stores and of Kafka as answers of the admin API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fairlane.outcomes import Code
from fairlane.schema_registry import RegistryError
from fairlane_server.administration.dead_letters import TooMuchError
from fairlane_server.administration.events import AuditError
from fairlane_server.administration.model_routes import (
    InvalidModelChangeError,
    ModelChangedError,
    ModelConflictError,
    ModelError,
    ModelNotFoundError,
)
from fairlane_server.administration.tenants import (
    ETagNeededError,
    TenantChangedError,
    TenantConflictError,
    TenantError,
    TenantNotFoundError,
)
from fairlane_server.api_keys.key_store import (
    ApiKeysError,
    BeyondOwnRightsError,
    InvalidKeyError,
    KeyEndedError,
    KeyNotFoundError,
)
from fairlane_server.evaluation.run_store import RunTakenError
from fairlane_server.evaluation.set_store import EvaluationStoreError, UnknownEvaluationError
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.open_kafka import OpenKafkaError
from fairlane_server.labelling.queue import LabelError, UnknownLabelItemError
from fairlane_server.log_replay.store import LogReplayNotFoundError, LogReplayStateError
from fairlane_server.postgres.migrations import DatabaseError
from fairlane_server.store_error import StoreError
from producers.gateway.openapi import ErrorDocs, errors
from producers.openai_api.errors import UNAVAILABLE, GatewayError

NOT_FOUND: Final = "not_found"
CONFLICT: Final = "conflict"
CHANGED: Final = "precondition_failed"
ETAG_NEEDED: Final = "precondition_required"
_RETRY_AFTER_MS: Final = 2_000

_DOCS: ErrorDocs = {
    400: (Code.INVALID, "A field is invalid; `field` names it"),
    404: (NOT_FOUND, "There is nothing with this name"),
    409: (CONFLICT, "The state of it does not permit this"),
    412: (CHANGED, "It was changed since; read it again"),
    428: (ETAG_NEEDED, "An existing tenant is changed with `If-Match`"),
}
READING = errors((400, 401, 403, 429, 503), _DOCS, is_native=True)
READING_ONE = errors((400, 401, 403, 404, 429, 503), _DOCS, is_native=True)
CHANGING = errors((400, 401, 403, 404, 409, 413, 429, 503), _DOCS, is_native=True)
CHANGING_MODELS = errors((400, 401, 403, 404, 409, 412, 413, 429, 503), _DOCS, is_native=True)
CHANGING_TENANTS = errors((400, 401, 403, 404, 409, 412, 413, 428, 429, 503), _DOCS, is_native=True)


_ANSWERS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int, str, str | None], ...] = (
    (InvalidKeyError, 400, Code.INVALID, None),
    (InvalidModelChangeError, 400, Code.INVALID, None),
    (TooMuchError, 400, Code.INVALID, "since"),
    (BeyondOwnRightsError, 403, Code.FORBIDDEN, None),
    ((KeyNotFoundError, TenantNotFoundError, ModelNotFoundError, LogReplayNotFoundError), 404, NOT_FOUND, None),
    ((UnknownEvaluationError, UnknownLabelItemError), 404, NOT_FOUND, None),
    (
        (KeyEndedError, TenantConflictError, ModelConflictError, OpenKafkaError, LogReplayStateError),
        409,
        CONFLICT,
        None,
    ),
    ((RunTakenError, LabelError), 409, CONFLICT, None),
    (EvaluationStoreError, 400, Code.INVALID, None),
    ((TenantChangedError, ModelChangedError), 412, CHANGED, "if-match"),
    (ETagNeededError, 428, ETAG_NEEDED, "if-match"),
)
"""Errors with the status, the code and the field of their answers. An error that knows its own field names that."""
_OF_POSTGRES = (ApiKeysError, AuditError, DatabaseError, StoreError)
_OF_KAFKA = (ClusterError, RegistryError)
_KNOWN = (
    *(*_OF_POSTGRES, *_OF_KAFKA),
    *(TenantError, ModelError, TooMuchError, OpenKafkaError, LogReplayNotFoundError, LogReplayStateError),
)


@contextmanager
def answered_errors() -> Iterator[None]:
    """Turns errors of the block into GatewayErrors."""
    try:
        yield
    except _KNOWN as error:
        raise _answer_to(error) from None


def _answer_to(error: Exception) -> GatewayError:
    for kinds, status, code, field in _ANSWERS:
        if isinstance(error, kinds):
            return GatewayError(status, code, str(error), field=getattr(error, "field", None) or field)
    server = "Kafka" if isinstance(error, _OF_KAFKA) else "Postgres"
    return unavailable(f"{server}: {error}")


def unavailable(message: str) -> GatewayError:
    """503: nothing was changed, or the audit says what was."""
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def not_found(message: str) -> GatewayError:
    """404."""
    return GatewayError(404, NOT_FOUND, message)
