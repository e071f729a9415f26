"""Calls over HTTP: chat completions of the gateway, with a key per tenant."""

import json
from collections.abc import Mapping

from producers.replay.calls import CONNECTION, Answer, OnText
from producers.replay.chat_stream import ChatStream, answer_of
from producers.replay.http_client import HttpClient, HttpError
from producers.replay.profiles import PATH, chat_body
from producers.replay.trace import Call


class GatewayTarget:
    """A gateway.

    Args:
        url: where it is.
        keys: by tenant, as reports call it, the key to call with. Never shown.
        model: what to ask.
        stream: have the answers streamed.

    Raises:
        ValueError: ``url`` is none, or a key cannot stand in a header.
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
        """Nothing to make ready: the first calls connect."""

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> Answer:
        body = json.dumps(chat_body(call, self._model, timeout_s, stream=self._stream)).encode()
        request = self._client.request("POST", PATH, self._headers[call.tenant], body)
        try:
            if not self._stream:
                reply = await self._client.send(request)
                return answer_of(reply.status, reply.body)
            stream = ChatStream(on_text)
            reply = await self._client.send(request, stream.feed)
            return stream.answer(reply.status)
        except HttpError:
            return Answer(CONNECTION)

    async def close(self) -> None:
        self._client.close()
