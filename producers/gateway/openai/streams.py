"""Responses of text routes, whole or streamed, and their dependencies."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fairlane.client.reassembly import TextDelta
from fairlane.records import InferenceReply, ModelVersion
from producers.gateway.pipeline.call_context import note_error
from producers.gateway.pipeline.pending import PendingReply
from producers.gateway.sending import (
    ClientGoneError,
    Published,
    SendingDeps,
    checked,
    leave,
    reply_in_time,
    unless_gone,
)
from producers.openai_api.errors import (
    REQUEST_ID_HEADER,
    STREAM_RESTARTED,
    GatewayError,
    budget_headers,
    client_gone,
    error_body,
    waited_too_long,
)
from producers.openai_api.responses import KEEP_ALIVE, STREAM_HEADERS, RequestEcho, TextEvents, error_event, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIDeps(SendingDeps):
    """Dependencies of ``router``.

    Attributes:
        models_of: models that a tenant may use, in any order.
        may_name: whether a tenant may name this model, version or alias.
        keep_alive_s: longest silence of a stream before a keep-alive. The status of a stream is held back as long, so
            that a request that fails by then gets an error status.
    """

    models_of: Callable[[str], Sequence[ModelVersion]]
    may_name: Callable[[str, str], bool]
    keep_alive_s: float = 10.0

    def echo(
        self, published: Published, reply: InferenceReply | None = None, *, with_usage: bool = False
    ) -> RequestEcho:
        """Request fields that the response repeats. The time is the reply's, the same in a repeated response."""
        submitted_at_ms = None if reply is None else reply.timings.submitted_at_ms
        at_ms = self.clock_ms() if submitted_at_ms is None else submitted_at_ms
        return RequestEcho(published.request_id, published.model, at_ms // 1_000, with_usage)


class DivergedError(Exception):
    """The restarted answer differs from the text already sent, which cannot be withdrawn."""


class Continuation:
    """Compares the text already sent with the text of a restarted run.

    A run may be lost with its machine; the next run starts from the beginning. While it repeats the text already sent,
    which is usual without sampling, nothing is sent until it goes beyond that text. If it differs, the stream ends.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._again: str | None = None
        """Text since the last restart, until it covers all that was sent."""

    @property
    def sent(self) -> str:
        """All text sent so far."""
        return "".join(self._sent)

    def feed(self, delta: TextDelta) -> str:
        """Return the text to send now; may be empty. Raises DivergedError."""
        if delta.restarted:
            self._again = ""
        if self._again is None:
            self._sent.append(delta.text)
            return delta.text
        again, sent = self._again + delta.text, self.sent
        if not again.startswith(sent):
            if not sent.startswith(again):
                raise DivergedError
            self._again = again
            return ""
        self._again = None
        self._sent = [again]
        return again[len(sent) :]

    def finish(self) -> None:
        """Check the end of an ``ok`` answer. Raises DivergedError: it is shorter than the text sent."""
        if self._again is not None and self._again != self.sent:
            raise DivergedError


SILENCE = TextDelta("")
"""No delta arrived in time."""


class Deltas:
    """Deltas of one answer, and the silences between them. ``wait_s`` is the longest wait for a delta, in seconds."""

    def __init__(self, waiting: PendingReply, wait_s: float) -> None:
        self._deltas = waiting.deltas(wait_s)
        self._coming: asyncio.Task[TextDelta | None] | None = None

    async def next(self, silence_s: float) -> TextDelta | None:
        """The next delta, ``SILENCE`` after ``silence_s``, or None at the end. Raises TimeoutError: see ``wait_s``."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._deltas, None))
        done, _ = await asyncio.wait((self._coming,), timeout=silence_s)
        if not done:
            return SILENCE
        coming, self._coming = self._coming, None
        return await coming

    async def close(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        if isinstance(self._deltas, AsyncGenerator):
            await self._deltas.aclose()


def json_response(reply: InferenceReply, body: bytes) -> Response:
    """JSON response with the request id in a header, and a budget that is reached in another."""
    headers = {REQUEST_ID_HEADER: reply.request_id} | budget_headers(reply.budget)
    return Response(body, media_type="application/json", headers=headers)


async def text_response(
    deps: OpenAIDeps,
    request: Request,
    published: Published,
    wish: tuple[bool, bool],
    stream_of: Callable[[RequestEcho], TextEvents],
    whole: Callable[[InferenceReply, RequestEcho], bytes],
) -> Response:
    """Response to a text request. ``wish``: whether it is streamed, and whether a stream ends with usage.

    Raises GatewayError.
    """
    is_streamed, with_usage = wish
    if is_streamed:
        return await _streamed(deps, request, published, stream_of(deps.echo(published, with_usage=with_usage)))
    reply = await reply_in_time(deps, published, request.receive)
    return json_response(reply, whole(reply, deps.echo(published, reply)))


async def _streamed(deps: OpenAIDeps, request: Request, published: Published, stream: TextEvents) -> Response:
    """The answer as server-sent events.

    The status is sent with the first text or after ``keep_alive_s``: a request that fails before that gets an error
    status. Raises GatewayError.
    """
    headers = dict(STREAM_HEADERS) | {REQUEST_ID_HEADER: published.request_id}
    waiting = published.source
    if isinstance(waiting, InferenceReply):
        text = text_of(checked(waiting))
        events = stream.first() + (stream.text(text) if text else b"") + stream.last(waiting)
        return Response(events, headers=headers)
    deltas = Deltas(waiting, deps.wait_s)
    relay = _Relay(published, waiting, deltas, stream, deps)
    try:
        first = await unless_gone(request.receive, deltas.next(deps.keep_alive_s))
        reply = checked(await relay.final_reply()) if first is None else None
    except BaseException as error:
        relay.ended = not isinstance(error, ClientGoneError)
        await relay.close()
        if isinstance(error, ClientGoneError):
            raise client_gone(published.request_id) from None
        if isinstance(error, TimeoutError):
            raise waited_too_long(published.request_id, deps.wait_s) from None
        raise
    return EventStream(relay.events(first, reply), headers, relay.close)


@dataclass(slots=True)
class _Relay:
    """One streamed answer.

    Attributes:
        ended: the answer or its error is complete; a client that disconnects before that leaves its request.
    """

    published: Published
    waiting: PendingReply
    deltas: Deltas
    stream: TextEvents
    deps: OpenAIDeps
    ended: bool = False

    async def events(self, first: TextDelta | None, reply: InferenceReply | None) -> AsyncGenerator[bytes, None]:
        """All events, starting with the first delta or silence, or those of a reply without deltas."""
        if begin := self.stream.first():
            yield begin
        sent = Continuation()
        request_id = self.published.request_id
        try:
            delta = first
            while delta is not None:
                if delta is SILENCE:
                    yield KEEP_ALIVE
                elif text := sent.feed(delta):
                    yield self.stream.text(text)
                delta = await self.deltas.next(self.deps.keep_alive_s)
            if reply is None:
                reply = checked(await self.final_reply())
            sent.finish()
            end = self.stream.last(reply)
        except GatewayError as error:
            end = _failed(error)
        except TimeoutError:
            end = _failed(waited_too_long(request_id, self.deps.wait_s))
        except DivergedError:
            where = f"/v1/results/{request_id}"
            message = f"the answer began anew with other text, and what was sent is void; ask for {where}"
            end = _failed(GatewayError(500, STREAM_RESTARTED, message, request_id=request_id))
        self.ended = True
        yield end

    async def final_reply(self) -> InferenceReply:
        """The reply after the last delta. Raises TimeoutError."""
        reply = await self.waiting.reply(self.deps.wait_s)
        await self.published.call.settle(reply)
        return reply

    async def close(self) -> None:
        """Release the waiter; leave the request if the client disconnected early."""
        try:
            await self.deltas.close()
            if not self.ended:
                note_error(client_gone(self.published.request_id))
                await leave(self.deps, self.published)
        finally:
            self.waiting.forget()


class EventStream(StreamingResponse):
    """Streams events, and calls ``close`` when they are sent or the client has disconnected."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(events, headers=headers)
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # The connection's limits cut off a client that does not read.
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                if self._close is not None:
                    await self._close()


def _failed(error: GatewayError) -> bytes:
    """Last event of a stream that fails after its status was sent."""
    note_error(error)
    return error_event(error_body(error))
