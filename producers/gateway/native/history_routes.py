"""Routes of the history: ended requests, page by page."""

import base64
import binascii
from hashlib import blake2b
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import AwareDatetime
from starlette.responses import Response

from fairlane.outcomes import Code, Outcome
from fairlane_server.caching.entries import UNREADABLE, canonical
from fairlane_server.postgres.request_timeline import RecordedReply
from fairlane_server.text import NUL
from producers.gateway.identity.identity import Identity
from producers.gateway.native import openapi
from producers.gateway.native.deps import NativeDeps, require_read
from producers.gateway.native.response_bodies import HistoryAnswer, answered, ended_answer
from producers.gateway.results.request_store import EndedCursor, EndedFilter
from producers.openai_api.errors import GatewayError

MOST_CURSOR_CHARS = 4_096

_FILTER_BYTES = 8
_LARGEST_INT = 2**63 - 1


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    filter: bytes
    place: EndedCursor


_decoder = msgspec.msgpack.Decoder(_Cursor)


def cursor_of(tenant: str, wanted: EndedFilter, place: EndedCursor) -> str:
    """Cursor of the page after this place, for the same tenant and filter."""
    raw = msgspec.msgpack.encode(_Cursor(_digest(tenant, wanted), place))
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def place_of(tenant: str, wanted: EndedFilter, cursor: str) -> EndedCursor:
    """The place in a cursor. It is not signed: it gives access to nothing that its caller could not ask for anyway.

    Raises GatewayError: 400 for an invalid cursor, or one of another filter.
    """
    if len(cursor) > MOST_CURSOR_CHARS:
        raise _refusal("is no cursor")
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found = _decoder.decode(raw)
    except (binascii.Error, *UNREADABLE):
        raise _refusal("is no cursor") from None
    place = found.place
    numbers = place.replied_at_ms, place.source_partition, place.source_offset
    if any(abs(number) > _LARGEST_INT for number in numbers) or NUL in place.request_id + place.source_topic:
        raise _refusal("is no cursor")
    if found.filter != _digest(tenant, wanted):
        raise _refusal("belongs to another query: leave the other parameters as they were")
    return place


def _digest(tenant: str, wanted: EndedFilter) -> bytes:
    parts = (tenant, wanted.outcome, wanted.model, wanted.since_ms, wanted.until_ms)
    return blake2b(canonical(parts), digest_size=_FILTER_BYTES).digest()


def _refusal(message: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, message, field="cursor")


MOST_OF_PAGE = 100

Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most requests of a page")]
Cursor = Annotated[
    str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before; same filters")
]
Model = Annotated[str | None, Query(min_length=1, max_length=128, description="The model that answered")]
Ended = Annotated[Outcome | None, Query(description="How they ended")]
Since = Annotated[AwareDatetime | None, Query(description="Those that ended then or later, RFC 3339")]
Until = Annotated[AwareDatetime | None, Query(description="Those that ended before")]


def add_history_routes(router: APIRouter, deps: NativeDeps) -> None:
    """GET /v1/requests."""
    Caller = Annotated[Identity, Depends(deps.authenticate)]  # noqa: N806 - a type

    @router.get(
        "/v1/requests", responses=openapi.answers(200, HistoryAnswer, "A page") | openapi.READING, tags=["requests"]
    )
    async def list_requests(
        caller: Caller,
        status: Ended = None,
        model: Model = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = 20,
        cursor: Cursor = None,
    ) -> Response:
        """Ended requests, newest first; requests that end meanwhile do not shift the pages."""
        tenant = require_read(caller)
        if model is not None and NUL in model:
            raise GatewayError(400, Code.INVALID, "holds a NUL character", field="model")
        since_ms, until_ms = (None if at is None else round(at.timestamp() * 1_000) for at in (since, until))
        wanted = EndedFilter(None if status is None else status.value, model, since_ms, until_ms)
        behind = None if cursor is None else place_of(tenant, wanted, cursor)
        found = await deps.results.ended(tenant, wanted, behind, limit + 1)
        shown, has_more = found[:limit], len(found) > limit
        next_cursor = cursor_of(tenant, wanted, _place(shown[-1])) if has_more else None
        data = tuple(map(ended_answer, shown))
        return answered(HistoryAnswer(data=data, has_more=has_more, next_cursor=next_cursor))


def _place(recorded: RecordedReply) -> EndedCursor:
    source = recorded.reply.source
    assert source is not None  # noqa: S101 - what comes from a row has one
    return EndedCursor(recorded.replied_at_ms, recorded.reply.request_id, source.topic, source.partition, source.offset)
