"""A call whose publish was not confirmed: sent again under its key it is published under the same id."""

import asyncio
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.types import Message

from fairlane.records import InferenceReply, InferenceRequest, RequestInput
from producers.gateway.idempotency import Idempotency, LocalClaims
from producers.gateway.pipeline.call_context import CallContext as HttpCaller
from producers.gateway.pipeline.call_context import present
from producers.gateway.pipeline.pending import PendingReply
from producers.gateway.pipeline.publisher import away, not_confirmed
from producers.gateway.sending import Published, SendingDeps, publish
from producers.openai_api.errors import GatewayError
from producers.openai_api.request_models import ClosedBody
from tests.kit.openai_kit import Script, ScriptedWaiting, authenticate

REQUEST = InferenceRequest("", "chat", "generate", RequestInput(prompt="p"))


class Kafka:
    """Publishes, refuses or leaves in doubt, as the test says."""

    def __init__(self) -> None:
        self.error: GatewayError | None = None
        self.published: list[str] = []
        self._made = 0

    def new_request_id(self) -> str:
        self._made += 1
        return f"id-{self._made}"

    async def submit(self, tenant: str, request: InferenceRequest) -> PendingReply:
        if self.error is not None:
            raise self.error
        self.published.append(request.request_id)
        return ScriptedWaiting(request, InferenceReply(request.request_id, tenant, "ok"), Script())  # type: ignore[return-value]  # a double

    async def cancel(self, tenant: str, request_id: str) -> None:
        raise NotImplementedError


class Caller:
    """Sends the same call again and again."""

    def __init__(self) -> None:
        self.kafka = Kafka()
        self.replies: dict[str, InferenceReply] = {}
        self.known: list[str] = []
        self._deps = SendingDeps(
            self.kafka,  # type: ignore[arg-type]  # a double
            authenticate,
            Idempotency(LocalClaims(), self._find),
            60.0,
            self._know,
        )

    async def _find(self, _tenant: str, request_id: str) -> InferenceReply | None:
        return self.replies.get(request_id)

    def _know(self, tenant: str, request: InferenceRequest) -> None:
        assert tenant == "acme"
        self.known.append(request.request_id)

    async def send(self) -> Published:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        request = Request({"type": "http", "headers": [(b"idempotency-key", b"key-1")]}, receive)
        published, _ = await publish(
            self._deps,
            request,
            "acme",
            "/v1/requests",
            ClosedBody,
            lambda _body, _tenant, request_id: replace(REQUEST, request_id=request_id),
            lambda _body: None,
        )
        return published

    async def refused(self, error: GatewayError) -> None:
        self.kafka.error = error
        with pytest.raises(GatewayError):
            await self.send()
        self.kafka.error = None


def test_what_is_in_doubt_is_published_again_under_its_id() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.refused(not_confirmed("id-1"))
        assert (await caller.send()).request_id == "id-1"
        with pytest.raises(GatewayError) as raised:
            await caller.send()
        assert raised.value.status == 409

    asyncio.run(test())


def test_what_is_in_doubt_is_known_by_its_id_and_what_is_refused_is_not() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.refused(away())
        assert not caller.known
        await caller.refused(not_confirmed("id-2"))
        assert caller.known == ["id-2"], "its caller was told to ask for it"
        caller.replies["id-2"] = InferenceReply("id-2", "acme", "ok")
        await caller.send()
        assert caller.known == ["id-2"], "nothing was accepted now"

    asyncio.run(test())


def test_a_refusal_after_a_doubt_frees_nothing() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.refused(not_confirmed("id-1"))
        await caller.refused(away())
        assert (await caller.send()).request_id == "id-1", "the first may be in the log"

    asyncio.run(test())


def test_a_refusal_without_a_doubt_frees_the_key() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.refused(away())
        assert (await caller.send()).request_id == "id-2"

    asyncio.run(test())


def test_what_was_run_meanwhile_is_not_published_again() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.refused(not_confirmed("id-1"))
        caller.replies["id-1"] = InferenceReply("id-1", "acme", "ok")
        assert (await caller.send()).source == caller.replies["id-1"]
        assert not caller.kafka.published

    asyncio.run(test())


def test_a_call_that_was_answered_before_is_named_after_its_request() -> None:
    async def test() -> None:
        caller = Caller()
        await caller.send()
        caller.replies["id-1"] = InferenceReply("id-1", "acme", "ok")
        call = HttpCaller()
        token = present.set(call)
        try:
            assert (await caller.send()).call.reply is not None
        finally:
            present.reset(token)
        assert call.request_id == "id-1"
        assert caller.kafka.published == ["id-1"]

    asyncio.run(test())
