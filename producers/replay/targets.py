"""Targets of a load: the gateway over HTTP, and the client SDK over Kafka."""

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from fairlane import (
    AsyncClient,
    Backpressure,
    ClientClosed,
    FairlaneError,
    InferenceReply,
    KafkaSettings,
    PublishFailed,
    Timeout,
    Unavailable,
    Unsuccessful,
)
from fairlane.client import RequestFields
from fairlane.outcomes import CacheMode
from producers.replay.calls import (
    CONNECTION,
    TIMEOUT,
    CallOutcome,
    ChatStreamParser,
    OnText,
    of_body,
    of_reply,
    retry_after_s,
)
from producers.replay.http_client import HttpClient, HttpError
from producers.replay.profiles import PATH, chat_body
from producers.replay.trace import Call, text_of

_OUTCOMES: Mapping[type[FairlaneError], CallOutcome] = {
    Timeout: CallOutcome(TIMEOUT),
    PublishFailed: CallOutcome("publish_failed"),
    Backpressure: CallOutcome("backpressure", shed=True),
    Unavailable: CallOutcome("unavailable"),
    ClientClosed: CallOutcome("client_closed"),
}


class LoadTarget(Protocol):
    """Makes calls, for any number of tasks at once."""

    async def start(self) -> None:
        """Connect. Raises its own errors when it cannot work at all."""
        ...

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> CallOutcome:
        """Make one call and wait for its end. May be cancelled at any time, and leaves nothing behind.

        ``timeout_s``: also sent to the service; the caller ends the wait. ``on_text``: called at the first text of a
        stream.
        """
        ...

    async def close(self) -> None: ...


class GatewayTarget:
    """Chat completions of the gateway. ``keys``: API key by tenant, never shown.

    Raises ValueError: ``url`` is invalid, or a key cannot be sent in a header.
    """

    def __init__(self, url: str, keys: Mapping[str, str], model: str, *, stream: bool) -> None:
        self._client = HttpClient(url)
        self._model = model
        self._stream = stream
        self._headers = {
            tenant: {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            for tenant, key in keys.items()
        }
        for tenant, headers in self._headers.items():
            try:
                self._client.request("POST", PATH, headers)
            except ValueError:
                raise ValueError(f"key of {tenant}: holds a character that a header cannot") from None

    async def start(self) -> None:
        """The first calls connect."""

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> CallOutcome:
        body = json.dumps(chat_body(call, self._model, timeout_s, stream=self._stream)).encode()
        request = self._client.request("POST", PATH, self._headers[call.tenant], body)
        try:
            if not self._stream:
                reply = await self._client.send(request)
                return of_body(reply.status, reply.body, retry_after_s(reply.headers))
            stream = ChatStreamParser(on_text)
            reply = await self._client.send(request, stream.feed)
            return stream.outcome(reply.status, retry_after_s(reply.headers))
        except HttpError:
            return CallOutcome(CONNECTION)

    async def close(self) -> None:
        self._client.close()


class SdkTarget:
    """The client SDK, one client per tenant. ``max_in_flight``: of each tenant; calls beyond it are not sent.

    Raises ValueError: an invalid tenant.
    """

    def __init__(
        self, settings: KafkaSettings, tenants: Sequence[str], model: str, *, stream: bool, max_in_flight: int
    ) -> None:
        self._model = model
        self._stream = stream
        self._clients = {
            # No waiting for room: that would be the load of a closed loop.
            tenant: AsyncClient(tenant, settings=settings, max_in_flight=max_in_flight, submit_timeout_ms=1)
            for tenant in tenants
        }

    async def start(self) -> None:
        """Connect, so that the first calls do not wait for it. Raises Unavailable."""
        for client in self._clients.values():
            await client.start()

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> CallOutcome:
        client = self._clients[call.tenant]
        fields: RequestFields = {
            "model": self._model,
            "messages": [{"role": "user", "content": text_of(call.number, call.prompt_tokens)}],
            "max_tokens": call.output_tokens,
            "timeout_ms": max(1, round(timeout_s * 1_000)),
            "cache": CacheMode.NONE,
        }
        try:
            reply = await (self._streamed(client, fields, on_text) if self._stream else self._whole(client, fields))
        except Unsuccessful as error:
            reply = error.reply
        except FairlaneError as error:
            return _OUTCOMES.get(type(error), CallOutcome("client_error"))
        return of_reply(reply)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    @staticmethod
    async def _whole(client: AsyncClient, fields: RequestFields) -> InferenceReply:
        handle = await client.submit(**fields)
        try:
            return await handle.reply()
        finally:
            # Cancelled: the answer is not needed any more.
            if not handle.done():
                handle.cancel()

    @staticmethod
    async def _streamed(client: AsyncClient, fields: RequestFields, on_text: OnText) -> InferenceReply:
        async with client.stream(**fields) as stream:
            async for delta in stream:
                if delta.text:
                    on_text()
            return await stream.reply()
