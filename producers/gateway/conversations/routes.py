"""``/v1/conversations`` and ``/v1/erasures``: what was said, and the right to have it forgotten."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fairlane_server.conversations.conversations import Conversations, TurnPage, TurnPlace
from fairlane_server.erasure.erasures import Erasure, ErasureKind, is_erasure_id
from producers.gateway.conversations import bodies
from producers.gateway.conversations.bodies import (
    ConversationAnswer,
    ConversationPage,
    ErasureAnswer,
    ErasurePage,
    NewErasure,
    TurnAnswer,
    TurnsPage,
)
from producers.gateway.conversations.deps import ERRORS, ConversationDeps, unknown_conversation, unknown_erasure
from producers.gateway.identity.identity import Identity, Permission
from producers.gateway.native.cursors import MOST_CURSOR_CHARS, Cursors
from producers.gateway.native.response_bodies import answered, page_of
from producers.gateway.openapi import EXAMPLE_ID, READ_STATUSES, Responses, errors, taking
from producers.gateway.openapi import answered as documented
from producers.gateway.sending import body_of
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError

MOST_OF_PAGE = 100
MOST_TURNS_OF_PAGE = 50
_EXPORTED_AT_ONCE = 50
_MOST_ID_CHARS = 128

ConversationId = Annotated[str, Path(description="Id of the conversation", examples=[bodies.CONVERSATION_ID])]
ErasureId = Annotated[str, Path(description="Id of the erasure", examples=[bodies.ERASURE_ID])]
Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most entries of a page")]
TurnLimit = Annotated[int, Query(ge=1, le=MOST_TURNS_OF_PAGE, description="Most turns of a page")]
Cursor = Annotated[str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before")]

_names, _turns, _erasures = Cursors(str), Cursors(TurnPlace), Cursors(tuple[int, str])
_EXPORT: Responses = {
    200: {
        "description": "A line of JSON for each turn, in their order",
        "content": {"application/jsonl": {"schema": {"type": "string"}, "example": bodies.EXPORT}},
    }
}


def router(deps: ConversationDeps) -> APIRouter:
    """All routes of conversations and erasures."""
    api = APIRouter(prefix="/v1", tags=["conversations"])
    _add_reading(api, deps)
    _add_erasing(api, deps)
    return api


def _add_reading(api: APIRouter, deps: ConversationDeps) -> None:
    read = errors((*READ_STATUSES, 400), ERRORS, is_native=True)
    Reader = Annotated[Identity, Depends(deps.permitted(Permission.CONVERSATIONS_READ))]  # noqa: N806 - a type

    @api.get("/conversations", summary="The conversations", responses=documented(bodies.CONVERSATIONS, "A page") | read)
    async def list_conversations(caller: Reader, limit: Limit = 20, cursor: Cursor = None) -> Response:
        """Conversations by id, with their numbers of turns; not what was said."""
        query = (caller.tenant, "conversations")
        behind = _names.decode(query, cursor) or ""
        found = await deps.of_conversations(caller, lambda store: store.page(behind, limit + 1))
        return page_of(
            *(ConversationPage, found, limit, ConversationAnswer.of),
            lambda last: _names.encode(query, last.conversation_id),
        )

    @api.get(
        "/conversations/{conversation_id}",
        summary="What was said in one",
        responses=documented(bodies.TURNS, "A page") | read,
    )
    async def get_conversation(
        conversation_id: ConversationId, caller: Reader, limit: TurnLimit = 20, cursor: Cursor = None
    ) -> Response:
        """Turns of a conversation, the first one first."""
        query = (caller.tenant, "turns", _known(conversation_id))
        behind = _turns.decode(query, cursor)
        page = await deps.of_conversations(caller, lambda store: store.turns_behind(conversation_id, behind, limit))
        next_cursor = None if page.behind is None else _turns.encode(query, page.behind)
        data = tuple(map(TurnAnswer.of, page.turns))
        return answered(TurnsPage(data=data, has_more=next_cursor is not None, next_cursor=next_cursor))

    @api.get(
        "/conversations/{conversation_id}/export",
        summary="Export one",
        response_class=StreamingResponse,
        responses=read | _EXPORT,
    )
    async def export_conversation(conversation_id: ConversationId, caller: Reader) -> Response:
        """Every turn, as JSON Lines, streamed. If it ends without the last turn, the connection is cut."""
        name = _known(conversation_id)
        first = await deps.of_conversations(caller, partial(_page, name=name, behind=None))
        return _Export(deps, caller, name, first)


def _add_erasing(api: APIRouter, deps: ConversationDeps) -> None:
    read = errors((*READ_STATUSES, 400), ERRORS, is_native=True)
    Reader = Annotated[Identity, Depends(deps.permitted(Permission.CONVERSATIONS_READ))]  # noqa: N806 - a type
    Eraser = Annotated[Identity, Depends(deps.permitted(Permission.CONVERSATIONS_ERASE))]  # noqa: N806 - a type
    erased = {
        **documented(bodies.ERASURE, "It is done: what is left expires"),
        **documented(bodies.ERASURE, "It is recorded, and goes on", 202),
    }

    @api.delete(
        "/conversations/{conversation_id}", summary="Erase a conversation", responses=erased | read, status_code=200
    )
    async def delete_conversation(conversation_id: ConversationId, caller: Eraser) -> Response:
        """Erase its turns, results and cached replies; says what expires when. Later requests start it anew."""
        name = _known(conversation_id)
        # An unknown conversation gets 404; `POST /v1/erasures` also erases what is not recorded yet.
        await deps.of_conversations(caller, partial(_page, name=name, behind=None, most=1))
        return await _erased(deps, caller, ErasureKind.CONVERSATION, [name])

    @api.post(
        "/erasures",
        summary="Erase a conversation or requests",
        responses=erased | errors((*READ_STATUSES, 400, 413), ERRORS, is_native=True),
        openapi_extra={
            "requestBody": taking(
                NewErasure,
                {
                    "A conversation": {"conversation_id": bodies.CONVERSATION_ID},
                    "Requests": {"request_ids": [EXAMPLE_ID]},
                },
            )["requestBody"]
        },
    )
    async def create_erasure(request: Request, caller: Eraser) -> Response:
        """Erase what is recorded, and what is under way: nothing that was submitted before is stored any more."""
        body = parse(NewErasure, await body_of(request))
        if body.conversation_id is not None:
            return await _erased(deps, caller, ErasureKind.CONVERSATION, [body.conversation_id])
        return await _erased(deps, caller, ErasureKind.REQUESTS, body.request_ids or [])

    @api.get("/erasures", summary="The erasures", responses=documented(bodies.ERASURES, "A page") | read)
    async def list_erasures(caller: Reader, limit: Limit = 20, cursor: Cursor = None) -> Response:
        """Erasures, newest first: who asked, when, and how much was deleted."""
        query = (caller.tenant, "erasures")
        behind = _erasures.decode(query, cursor)
        found = await deps.of_erasures(caller, lambda store: store.page(behind, limit + 1))
        return page_of(
            *(ErasurePage, found, limit),
            lambda one: ErasureAnswer.of(one, (), ()),
            lambda last: _erasures.encode(query, (last.requested_at_ms, last.erasure_id)),
        )

    @api.get("/erasures/{erasure_id}", summary="One erasure", responses=documented(bodies.ERASURE) | read)
    async def get_erasure(erasure_id: ErasureId, caller: Reader) -> Response:
        """How far it is, what expires, and when the last copy is gone."""
        if not is_erasure_id(erasure_id):
            raise unknown_erasure()
        found = await deps.of_erasures(caller, lambda store: store.get(erasure_id))
        if found is None:
            raise unknown_erasure()
        return answered(_answer(deps, caller, found))


async def _erased(deps: ConversationDeps, caller: Identity, kind: ErasureKind, names: list[str]) -> Response:
    found = await deps.erase(caller, kind, names)
    return answered(_answer(deps, caller, found), 200 if found.is_done else 202)


def _answer(deps: ConversationDeps, caller: Identity, erasure: Erasure) -> ErasureAnswer:
    return ErasureAnswer.of(erasure, deps.expires(caller.tenant, erasure), deps.keeps(erasure))


def _known(conversation_id: str) -> str:
    """The id, if a conversation can have it. Raises GatewayError: 404."""
    if not 1 <= len(conversation_id) <= _MOST_ID_CHARS:
        raise unknown_conversation()
    return conversation_id


def _page(conversations: Conversations, name: str, behind: TurnPlace | None, most: int = _EXPORTED_AT_ONCE) -> TurnPage:
    return conversations.turns_behind(name, behind, most)


class _Export(StreamingResponse):
    """All turns, page by page. Holds a transfer slot while it is sent, and is cut off after ``export_s`` seconds.
    Without a free slot, the call fails before the response starts."""

    def __init__(self, deps: ConversationDeps, caller: Identity, name: str, first: TurnPage) -> None:
        super().__init__(_lines(deps, caller, name, first), media_type="application/jsonl")
        self.headers["cache-control"] = "no-store"
        self._transfer: AbstractContextManager[None] = deps.transfers.taken(caller.tenant)
        self._export_s = deps.export_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._transfer, suppress(TimeoutError):
            async with asyncio.timeout(self._export_s):
                await super().__call__(scope, receive, send)


async def _lines(deps: ConversationDeps, caller: Identity, name: str, page: TurnPage) -> AsyncIterator[bytes]:
    while True:
        for turn in page.turns:
            yield TurnAnswer.of(turn).as_json() + b"\n"
        if page.behind is None:
            return
        try:
            page = await deps.of_conversations(caller, partial(_page, name=name, behind=page.behind))
        except GatewayError:
            # The connection is cut: a short answer must not look like a whole one.
            raise ConnectionAbortedError from None
