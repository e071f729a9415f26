"""Errors of stores and of Kafka as answers of the admin API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fairlane.outcomes import Code
from fairlane.schema_registry import RegistryError
from fairlane_server.administration.dead_letters import TooMuchError
from fairlane_server.administration.events import AuditError
from fairlane_server.administration.tenants import (
    ETagNeededError,
    TenantChangedError,
    TenantConflictError,
    TenantNotFoundError,
)
from fairlane_server.api_keys.key_store import (
    ApiKeysError,
    BeyondOwnRightsError,
    InvalidKeyError,
    KeyEndedError,
    KeyNotFoundError,
)
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.open_kafka import OpenKafkaError
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
CHANGING_TENANTS = errors((400, 401, 403, 404, 409, 412, 413, 428, 429, 503), _DOCS, is_native=True)


@contextmanager
def answered_errors() -> Iterator[None]:
    """Turns errors of the block into GatewayErrors."""
    try:
        yield
    except InvalidKeyError as error:
        raise GatewayError(400, Code.INVALID, str(error), field=error.field) from None
    except BeyondOwnRightsError as error:
        raise GatewayError(403, Code.FORBIDDEN, str(error)) from None
    except KeyNotFoundError as error:
        raise GatewayError(404, NOT_FOUND, str(error)) from None
    except KeyEndedError as error:
        raise GatewayError(409, CONFLICT, str(error)) from None
    except TenantNotFoundError as error:
        raise not_found(str(error)) from None
    except TenantConflictError as error:
        raise GatewayError(409, CONFLICT, str(error), field=error.field) from None
    except TooMuchError as error:
        raise GatewayError(400, Code.INVALID, str(error), field="since") from None
    except OpenKafkaError as error:
        raise GatewayError(409, CONFLICT, str(error)) from None
    except TenantChangedError as error:
        raise GatewayError(412, CHANGED, str(error), field="if-match") from None
    except ETagNeededError as error:
        raise GatewayError(428, ETAG_NEEDED, str(error), field="if-match") from None
    except (ApiKeysError, AuditError) as error:
        raise unavailable(f"Postgres: {error}") from None
    except (ClusterError, RegistryError) as error:
        raise unavailable(f"Kafka: {error}") from None


def unavailable(message: str) -> GatewayError:
    """503: nothing was changed, or the audit says what was."""
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def not_found(message: str) -> GatewayError:
    """404."""
    return GatewayError(404, NOT_FOUND, message)
