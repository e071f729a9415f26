"""Calls over the client: straight to Kafka, one client per tenant."""

from collections.abc import Mapping, Sequence

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
from producers.replay.calls import TIMEOUT, Answer, OnText, of_reply
from producers.replay.trace import Call, text_of

_ANSWERS: Mapping[type[FairlaneError], Answer] = {
    Timeout: Answer(TIMEOUT),
    PublishFailed: Answer("publish_failed"),
    Backpressure: Answer("backpressure", shed=True),
    Unavailable: Answer("unavailable"),
    ClientClosed: Answer("client_closed"),
}


class SdkTarget:
    """The log itself.

    Args:
        settings: how to reach Kafka.
        tenants: in whose names there are calls.
        model: what to ask.
        stream: have the answers streamed.
        max_in_flight: most calls of a tenant under way; what is more is not sent.

    Raises:
        ValueError: a name cannot be a tenant's.
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

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> Answer:
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
            return _ANSWERS.get(type(error), Answer("client_error"))
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
            # Left early, nobody wants the answer any more.
            if not handle.done():
                handle.cancel()

    @staticmethod
    async def _streamed(client: AsyncClient, fields: RequestFields, on_text: OnText) -> InferenceReply:
        async with client.stream(**fields) as stream:
            async for delta in stream:
                if delta.text:
                    on_text()
            return await stream.reply()
