"""Events of a request: status, text as it is generated, and result; as server-sent events or by WebSocket."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from random import random
from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Depends, WebSocket
from pydantic_core import to_json
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.edge.error_responses import error_response
from producers.gateway.identity.identity import Identity, Permission, declared, permit, require
from producers.gateway.native.deps import EventPolicy, NativeDeps, checked_id, unknown_request
from producers.gateway.native.response_bodies import result_answer, status_answer
from producers.gateway.openai.streams import SILENCE, Deltas, EventStream
from producers.gateway.openapi import READING, RequestId
from producers.gateway.pipeline.call_context import current, note_error
from producers.gateway.pipeline.pending import PendingReply
from producers.gateway.pipeline.publisher import draining
from producers.gateway.results.cache_entries import Arrival
from producers.gateway.results.request_status import RequestState, RequestStatus
from producers.openai_api.errors import GatewayError
from producers.openai_api.responses import KEEP_ALIVE, STREAM_HEADERS


class EventName(StrEnum):
    """Kinds of events."""

    STATUS = "status"
    """The request's status: first, and on every change."""
    DELTA = "delta"
    """The next piece of its text."""
    RESULT = "result"
    """The final reply; the last event."""
    PING = "ping"
    """Keep-alive while nothing happens."""
    TIMEOUT = "timeout"
    """The stream ends, the request goes on: reconnect."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event, with its JSON."""

    name: EventName
    data: bytes = b"{}"


_PING = Event(EventName.PING)

_LATE_TEXT_S = 1.0
"""Bound of the text of a request whose reply was found: the text is here already, or never comes."""


async def follow(deps: NativeDeps, tenant: str, status: RequestStatus) -> AsyncGenerator[Event, None]:
    """Events from the current status to the result.

    If the text of the request comes to this instance and no other stream has claimed it, the text is sent; otherwise
    status changes are. Replies that come to other instances are polled. A client that disconnects does not affect the
    request.
    """
    request_id = status.request_id
    # Before the first lookup, so that no reply is missed in between.
    with deps.results.arrivals.awaited(tenant, request_id) as arrival:
        yield _status(status)
        _, found = await _look(deps, tenant, request_id, with_status=status.status is RequestState.DONE)
        waiting = deps.kept.claim(tenant, request_id)
        try:
            if waiting is not None:
                async with aclosing(_text(waiting, status, deps.events, is_done=found is not None)) as texts:
                    async for event in texts:
                        yield event
        finally:
            if waiting is not None:
                waiting.forget()
        if found is not None:
            yield _result(found)
            return
        if _is_removed(status):
            return
        async with aclosing(_changes(deps, tenant, status, arrival)) as changes:
            async for event in changes:
                yield event


async def _text(
    waiting: PendingReply, status: RequestStatus, policy: EventPolicy, *, is_done: bool
) -> AsyncGenerator[Event, None]:
    deltas = Deltas(waiting, _LATE_TEXT_S if is_done else policy.longest_s)
    sent = RequestState.RUNNING if is_done else status.status
    try:
        while (delta := await deltas.next(policy.ping_s)) is not None:
            if delta is SILENCE:
                yield _PING
                continue
            if sent is not RequestState.RUNNING:
                sent = RequestState.RUNNING
                yield _status(replace(status, status=sent))
            yield Event(EventName.DELTA, to_json(delta))
    except TimeoutError:
        # Status changes can still be sent.
        return
    finally:
        waiting.forget()
        await deltas.close()


async def _changes(
    deps: NativeDeps, tenant: str, status: RequestStatus, arrival: Arrival
) -> AsyncGenerator[Event, None]:
    policy, sent = deps.events, _version(status)
    looks = 0
    now = monotonic()
    ends_at, ping_at, look_at = now + policy.longest_s, now + policy.ping_s, now + policy.first_look_s
    while now < ends_at:
        await asyncio.wait((arrival,), timeout=max(0.0, min(ends_at, ping_at, look_at) - now))
        if arrival.cancelled():
            # This instance has stopped delivering replies.
            break
        if arrival.done():
            yield _result(arrival.result())
            return
        now = monotonic()
        if now >= look_at:
            looks += 1
            with_status = looks % policy.status_every == 1
            current, found = await _look(deps, tenant, status.request_id, with_status=with_status)
            if found is not None:
                yield _result(found)
                return
            now = monotonic()
            look_at = now + _pause_s(deps, looks)
            if current is not None and _version(current) != sent:
                sent, ping_at = _version(current), now + policy.ping_s
                yield _status(current)
                if _is_removed(current):
                    return
        if now >= ping_at:
            ping_at = now + policy.ping_s
            yield _PING
    yield Event(EventName.TIMEOUT)


def _is_removed(status: RequestStatus) -> bool:
    """Whether it is done and no result comes any more."""
    return status.status is RequestState.DONE and status.reply is None


def _version(status: RequestStatus) -> tuple[RequestState, int]:
    """The part of a status whose change is an event."""
    return status.status, len(status.events)


def _pause_s(deps: NativeDeps, looks: int) -> float:
    """Delay until the next lookup: grows with each, and with the open streams, to bound their total rate."""
    policy = deps.events
    longest_s = max(policy.longest_look_s, deps.slots.total / policy.looks_per_s)
    return Backoff(policy.first_look_s, longest_s).delay_s(looks, random())  # noqa: S311 - jitter, no secret


async def _look(
    deps: NativeDeps, tenant: str, request_id: str, *, with_status: bool
) -> tuple[RequestStatus | None, RecordedReply | None]:
    """The current status and the reply, each if known; ``(None, None)`` if the lookup fails."""
    results = deps.results
    try:
        if (found := await results.find_seen(tenant, request_id)) is not None:
            return None, found
        if not with_status:
            return None, None
        status = await results.status(tenant, request_id)
        if status is None or status.status is not RequestState.DONE:
            return status, None
        return status, await results.find(tenant, request_id)
    except GatewayError:
        return None, None


def _result(recorded: RecordedReply) -> Event:
    return Event(EventName.RESULT, result_answer(recorded).as_json())


def _status(status: RequestStatus) -> Event:
    return Event(EventName.STATUS, status_answer(status).as_json())


_NOT_ALLOWED = frozenset({401, 403})


async def watched(
    events: AsyncGenerator[Event, None],
    ending: asyncio.Event,
    check: Callable[[], Awaitable[object]],
    check_s: float,
) -> AsyncGenerator[Event, None]:
    """The events, until they end, the gateway drains or the caller loses its permission. Does not close ``events``.

    When ``ending`` is set, the last event is ``timeout``. ``check`` is called about every ``check_s`` seconds; raises
    its GatewayErrors 401 and 403. Its others say nothing about the caller and are ignored.
    """
    ends = asyncio.ensure_future(ending.wait())
    coming: asyncio.Task[Event | None] | None = None
    check_at = _later(check_s)
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(events, None))
            timeout_s = max(0.0, check_at - monotonic())
            await asyncio.wait((coming, ends), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if monotonic() >= check_at:
                try:
                    await check()
                except GatewayError as error:
                    if error.status in _NOT_ALLOWED:
                        raise
                check_at = _later(check_s)
            if coming.done():
                done, coming = coming, None
                if (event := done.result()) is None:
                    return
                yield event
            elif ends.done():
                yield Event(EventName.TIMEOUT)
                return
    finally:
        waiting = [future for future in (coming, ends) if future is not None]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _later(check_s: float) -> float:
    """Time of the next check, with jitter: streams opened together must not check together."""
    return monotonic() + check_s * (0.75 + random() / 2)  # noqa: S311 - jitter, no secret


log = get_logger(__name__)

MOST_WORDS = 100
"""Messages from a WebSocket client, which are ignored; at this number the connection is closed."""

_POLICY = 1008
_FAILED = 1011
_EVENT_SCHEMA = {
    "type": "object",
    "description": "One event; a comment follows a long silence.",
    "properties": {
        "event": {"type": "string", "enum": [name.value for name in EventName if name is not EventName.PING]},
        "data": {
            "type": "string",
            "description": "JSON. `status`: the body of GET /v1/requests/{id}. `delta`: `text`, `restarted` "
            "(all earlier text is void) and `attempt`. `result`: the body of GET /v1/results/{id}. `timeout`: empty; "
            "the request continues, and the client may reconnect.",
        },
    },
    "required": ["event", "data"],
    "examples": [{"event": "delta", "data": '{"text":"The capital","restarted":false,"attempt":1}'}],
}


def add_event_routes(router: APIRouter, deps: NativeDeps) -> None:
    """GET /v1/requests/{id}/events, and the WebSocket of the same path."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_READ))]  # noqa: N806 - a type

    async def events(request: Request, request_id: RequestId, caller: Caller) -> Response:
        """`status` first and on every change, `delta` with text as it is generated, `result` at the end."""
        status = await _known(deps, caller, request_id)
        return EventStream(_lines(_permitted_events(deps, request, caller.tenant, status)), dict(STREAM_HEADERS))

    async def socket(websocket: WebSocket, request_id: str) -> None:
        """The same events as `{"event": …, "data": …}`, one per message."""
        try:
            caller = permit(await deps.authenticate(websocket), Permission.REQUESTS_READ)
            status = await _known(deps, caller, request_id)
        except GatewayError as error:
            # Denied before the accept: without an identity there is no connection.
            with suppress(OSError):
                await websocket.send_denial_response(error_response(websocket.url.path, error))
            return
        try:
            await websocket.accept()
        except OSError:
            # Raised if the client has left before the accept.
            return
        await _talk(websocket, _permitted_events(deps, websocket, caller.tenant, status))

    router.add_api_route(
        "/v1/requests/{request_id}/events",
        events,
        methods=["GET"],
        name="follow_request",
        tags=["requests"],
        response_class=Response,
        responses={
            200: {
                "description": "Server-sent events",
                "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
            },
            **READING,
        },
    )
    router.add_api_websocket_route(
        "/v1/requests/{request_id}/events",
        socket,
        name="follow_request_socket",
        # It denies the connection with an answer of the API's shape, so it checks the permission itself.
        dependencies=[Depends(declared(Permission.REQUESTS_READ))],
    )


async def _known(deps: NativeDeps, caller: Identity, request_id: str) -> RequestStatus:
    """The status of the request. Raises GatewayError if the caller may not follow it, no stream slot is left, or the
    gateway drains."""
    tenant, wanted = caller.tenant, checked_id(request_id)
    if deps.ending.is_set():
        raise draining()
    deps.slots.check(tenant)
    status = await deps.results.status(tenant, wanted)
    if status is None:
        raise unknown_request()
    return status


async def _permitted_events(
    deps: NativeDeps, connection: HTTPConnection, tenant: str, status: RequestStatus
) -> AsyncGenerator[Event, None]:
    """The events. Raises GatewayError: no stream slot is left, or the caller has lost its permission."""

    async def check() -> None:
        identity = await (deps.identify or deps.authenticate)(connection)
        if permit(identity, Permission.REQUESTS_READ).tenant != tenant:
            raise GatewayError(403, Code.FORBIDDEN, "the caller belongs to another tenant by now")

    with deps.slots.taken(tenant):
        async with (
            aclosing(follow(deps, tenant, status)) as events,
            aclosing(watched(events, deps.ending, check, deps.events.check_s)) as checked,
        ):
            async for event in checked:
                yield event


async def _lines(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield _line(event)
    except GatewayError as error:
        # A client that reconnects gets the error.
        note_error(error)


def _line(event: Event) -> bytes:
    if event.name is EventName.PING:
        return KEEP_ALIVE
    return b"event: " + event.name.encode() + b"\ndata: " + event.data + b"\n\n"


async def _talk(websocket: WebSocket, events: AsyncGenerator[Event, None]) -> None:
    """Send events until they end or the client is gone."""
    telling = asyncio.ensure_future(_tell(websocket, events))
    listening = asyncio.ensure_future(_listen(websocket))
    try:
        await asyncio.wait((telling, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done() and listening.result():
            await _close(websocket, _POLICY)
    finally:
        telling.cancel()
        listening.cancel()
        ended, _ = await asyncio.gather(telling, listening, return_exceptions=True)
        if isinstance(ended, Exception):
            log.warning("event_stream_failed", request_id=current().request_id, kind=type(ended).__name__)


async def _tell(websocket: WebSocket, events: AsyncGenerator[Event, None]) -> None:
    code = 1000
    try:
        async with aclosing(events):
            async for event in events:
                await websocket.send_text(f'{{"event":"{event.name}","data":{event.data.decode()}}}')
    except WebSocketDisconnect:
        # The client is gone.
        return
    except GatewayError as error:
        note_error(error)
        code = _POLICY if error.status in _NOT_ALLOWED else _FAILED
    await _close(websocket, code)


async def _listen(websocket: WebSocket) -> bool:
    """Discard messages until the client disconnects. True if it sent too many."""
    for _ in range(MOST_WORDS):
        if (await websocket.receive())["type"] == "websocket.disconnect":
            return False
    return True


async def _close(websocket: WebSocket, code: int) -> None:
    # It may be closed already, or the client gone.
    with suppress(RuntimeError, WebSocketDisconnect):
        await websocket.close(code)
