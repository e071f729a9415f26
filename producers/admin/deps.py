"""Dependencies of the admin routes, and parameters that they share."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import AwareDatetime

from fairlane.names import TENANT_PATTERN
from fairlane_server.administration.events import AdminAudit
from fairlane_server.api_keys.api_key import DEPLOYMENT
from fairlane_server.api_keys.key_store import ApiKeys, Author
from fairlane_server.api_keys.permissions import OF_DEPLOYMENT, Permission
from producers.admin.blocking import Serial
from producers.gateway.identity.identity import Authenticate, Identity, require
from producers.gateway.native.cursors import MOST_CURSOR_CHARS

PREFIX = "/v1/admin"
MOST_OF_PAGE = 100
EXAMPLE_KEY_ID = "0123456789abcdef"
AT_MS = 1_760_000_000_000

Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most items of a page")]
Cursor = Annotated[
    str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before; same parameters")
]
OWNER_PATTERN = rf"^({TENANT_PATTERN.pattern}|{DEPLOYMENT})$"
Owner = Annotated[str | None, Query(pattern=OWNER_PATTERN, description=f"Of this tenant, or `{DEPLOYMENT}`")]
Since = Annotated[AwareDatetime | None, Query(description="Then or later, RFC 3339")]
Until = Annotated[AwareDatetime | None, Query(description="Before then")]


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores in Postgres, used in the thread of ``calls`` alone."""

    calls: Serial
    keys: ApiKeys
    audit: AdminAudit


@dataclass(frozen=True, slots=True)
class AdminDeps:
    """Dependencies of all routes. ``authenticate`` is a FastAPI dependency that returns the caller's identity;
    ``kafka_calls`` is the thread of what uses Kafka."""

    authenticate: Authenticate
    stores: Stores
    kafka_calls: Serial

    def caller(self, permission: Permission) -> Any:
        """FastAPI dependency: the caller, who has this permission."""
        return Depends(require(self.authenticate, permission))


def author_of(caller: Identity) -> Author:
    """The caller as author of a change."""
    return Author(caller.requested_by, frozenset(one for one in OF_DEPLOYMENT if caller.may(one)))


def ms_of(at: AwareDatetime | None) -> int | None:
    """Milliseconds since the epoch."""
    return None if at is None else round(at.timestamp() * 1_000)
