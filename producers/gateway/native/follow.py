"""Follow a request: its status, its text as it is generated, and its result."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from random import random
from time import monotonic

from fairlane.backoff import Backoff
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.native.deps import EventPolicy, NativeDeps
from producers.gateway.native.response_bodies import DeltaAnswer, ResponseBody, result_answer, status_answer
from producers.gateway.openai.streams import Deltas, NoDelta
from producers.gateway.ports import PendingReply
from producers.gateway.results.recent_replies import Arrival
from producers.gateway.results.request_status import RequestState, RequestStatus
from producers.openai_api.errors import GatewayError


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
    """One event; pings and timeouts have no body."""

    name: EventName
    body: ResponseBody | None = None


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
        yield Event(EventName.STATUS, status_answer(status))
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
            if isinstance(delta, NoDelta):
                yield _PING
                continue
            if sent is not RequestState.RUNNING:
                sent = RequestState.RUNNING
                yield Event(EventName.STATUS, status_answer(replace(status, status=sent)))
            yield Event(EventName.DELTA, DeltaAnswer.model_validate(delta))
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
                yield Event(EventName.STATUS, status_answer(current))
        if now >= ping_at:
            ping_at = now + policy.ping_s
            yield _PING
    yield Event(EventName.TIMEOUT)


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
    return Event(EventName.RESULT, result_answer(recorded))
