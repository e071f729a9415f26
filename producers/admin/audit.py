"""The route of the audit."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from fairlane_server.administration.events import (
    AdminEventKind,
    AdminEventOutcome,
    EventFilter,
)
from fairlane_server.api_keys.permissions import Permission
from producers.admin.deps import (
    AT_MS,
    EXAMPLE_KEY_ID,
    AdminDeps,
    Cursor,
    Limit,
    Owner,
    Since,
    Until,
    ms_of,
)
from producers.admin.problems import READING, answered_errors
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.openapi import answered


class EventAnswer(ResponseBody):
    """Something that was done, by whom."""

    event_id: int
    occurred_at_ms: int
    tenant: str = Field(description="Whom it concerns; `_deployment`: not one tenant")
    event: str = Field(description=f"What was done: {', '.join(AdminEventKind)}")
    outcome: AdminEventOutcome
    author: str = Field(description="`key:` or `user:` and its id, or user and machine of a command")
    database_role: str
    key_id: str | None = None
    subject: str | None = None
    details: dict[str, Any] = Field(description="Before and after, without secrets and without text of requests")
    of_event: int | None = Field(None, description="The event with outcome `started` that this one ends")


Event = Annotated[AdminEventKind | None, Query(description="Only these")]
ByAuthor = Annotated[
    str | None,
    Query(min_length=1, max_length=300, pattern=r"^[^\x00]+$", alias="author", description="Only by this author"),
]

_EXAMPLE = EventAnswer(
    event_id=17,
    occurred_at_ms=AT_MS,
    tenant="acme",
    event=AdminEventKind.KEY_REVOKED,
    outcome=AdminEventOutcome.DONE,
    author=f"key:{EXAMPLE_KEY_ID}",
    database_role="fairlane_admin",
    key_id="fedcba9876543210",
    details={"key_name": "nightly report", "role": "tenant"},
)
_cursors = Cursors(int)


def router(deps: AdminDeps) -> APIRouter:
    """GET /audit."""
    api = APIRouter(tags=["audit"])
    stores = deps.stores
    Reader = Annotated[Identity, deps.caller(Permission.AUDIT_READ)]  # noqa: N806 - a type
    page = Page[EventAnswer](data=(_EXAMPLE,), has_more=False)

    @api.get("/audit", responses=answered(page, "A page") | READING)
    async def list_events(
        caller: Reader,
        tenant: Owner = None,
        event: Event = None,
        by: ByAuthor = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Who changed what, the latest first."""
        wanted = EventFilter(tenant, event, by, ms_of(since), ms_of(until))
        query = (caller.tenant, tenant, event, by, wanted.since_ms, wanted.until_ms)
        before = _cursors.decode(query, cursor)
        with answered_errors():
            found = await stores.calls.run(partial(stores.audit.list, wanted, before, limit + 1))
        return page_of(
            *(Page[EventAnswer], found, limit, EventAnswer.model_validate),
            lambda last: _cursors.encode(query, last.event_id),
        )

    return api
