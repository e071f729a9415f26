"""The OpenAI routes over a scripted way to Kafka, behind a real HTTP server in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request

from fairlane.client.reassembly import TextDelta
from fairlane.outcomes import Outcome, Task
from fairlane.records import Feedback, InferenceReply, InferenceRequest, ModelVersion, Output, Timings, TokenUsage
from producers.gateway.edge.error_responses import install
from producers.gateway.idempotency import Idempotency, LocalClaims
from producers.gateway.identity.identity import Identity, Role, Scope
from producers.gateway.openai.router import router
from producers.gateway.openai.streams import OpenAIDeps
from producers.openai_api.errors import GatewayError
from tests.kit.waiting import eventually, eventually_async

MODEL = "smollm2-135m-instruct"
EMBEDDER = "all-minilm-l6-v2"
KEY, VIEWER_KEY, OTHER_KEY = "key-acme", "key-acme-viewer", "key-globex"
VECTOR = (0.25, -0.5, 0.75)
SUBMITTED_AT_MS = 1_760_000_000_000

_IDENTITIES = {
    KEY: Identity("acme", "key-1", Role.TENANT),
    VIEWER_KEY: Identity("acme", "key-2", Role.VIEWER, frozenset({Scope.INFERENCE})),
    OTHER_KEY: Identity("globex", "key-3", Role.TENANT),
}


class Gate:
    """Something that comes when the test says so."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    def open(self) -> None:
        """Now."""
        self._is_open.set()

    async def passed(self) -> None:
        """It is open."""
        await eventually_async(self._is_open.is_set, what="a gate")


@dataclass(frozen=True)
class Script:
    """What becomes of a request.

    Attributes:
        outcome: fields of its reply beside the usual ones.
        deltas: of its stream; a gate waits. None: the whole text at once.
        before_reply: what the reply waits for.
        refused: raised by ``submit``.
    """

    outcome: dict[str, Any] = field(default_factory=dict)
    deltas: Sequence[TextDelta | Gate] | None = None
    before_reply: Gate | None = None
    refused: GatewayError | None = None


class ScriptedWaiting:
    """One request that was accepted."""

    answer: InferenceReply | None = None

    def __init__(self, request: InferenceRequest, reply: InferenceReply, script: Script) -> None:
        self.request = request
        self.tenant = reply.tenant
        self.forgotten = False
        self._reply = reply
        self._script = script
        text = "" if reply.output is None else reply.output.text or ""
        deltas = script.deltas if script.deltas is not None else [TextDelta(text)] if text else ()
        self._left = list(deltas)
        """Deltas that were not given yet; who asks again gets those alone."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    async def reply(self, timeout_s: float) -> InferenceReply:
        if self._script.before_reply is not None:
            async with asyncio.timeout(timeout_s):
                await self._script.before_reply.passed()
        return self._reply

    async def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        while self._left:
            if isinstance(delta := self._left[0], Gate):
                async with asyncio.timeout(timeout_s):
                    await delta.passed()
            del self._left[0]
            if isinstance(delta, TextDelta):
                yield delta
        await self.reply(timeout_s)

    def forget(self) -> None:
        self.forgotten = True


class ScriptedSubmitter:
    """Answers every request as a model would that knows Paris, or as its script says: one is taken for each submit."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.submitted: list[tuple[str, InferenceRequest]] = []
        self.waiting: list[ScriptedWaiting] = []
        self.replies: dict[tuple[str, str], InferenceReply] = {}
        self.cancelled: list[tuple[str, str]] = []
        self.feedback: list[Feedback] = []

    def clear(self) -> None:
        """Nothing was asked yet."""
        for memory in (self.scripts, self.submitted, self.waiting, self.replies, self.cancelled, self.feedback):
            memory.clear()

    async def submit(self, tenant: str, request: InferenceRequest) -> ScriptedWaiting:
        script = self.scripts.pop(0) if self.scripts else Script()
        if script.refused is not None:
            raise script.refused
        self.submitted.append((tenant, request))
        reply = replace(reply_to(request, tenant), **script.outcome)
        if script.before_reply is None:
            self.replies[tenant, request.request_id] = reply
        waiting = ScriptedWaiting(request, reply, script)
        self.waiting.append(waiting)
        return waiting

    async def cancel(self, tenant: str, request_id: str) -> None:
        self.cancelled.append((tenant, request_id))

    async def give_feedback(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)

    def new_request_id(self) -> str:
        return str(uuid4())

    async def find_reply(self, tenant: str, request_id: str) -> InferenceReply | None:
        """What was answered."""
        return self.replies.get((tenant, request_id))


def reply_to(request: InferenceRequest, tenant: str = "acme") -> InferenceReply:
    """An ``ok`` reply to it, or the refusal of a model that is not there."""
    if request.model not in (MODEL, EMBEDDER):
        return InferenceReply(
            request.request_id, tenant, Outcome.REJECTED, code="unknown_model", field="model", message="no such model"
        )
    if request.task == Task.EMBED:
        output = Output(embeddings=tuple(VECTOR for _ in request.input.texts or ()))
    else:
        output = Output(text="The capital of France is Paris.")
    return InferenceReply(
        request.request_id,
        tenant,
        Outcome.OK,
        model=request.model,
        model_version="1",
        task=request.task,
        output=output,
        finish_reason="stop",
        usage=TokenUsage(12, 7, 4),
        timings=Timings(submitted_at_ms=SUBMITTED_AT_MS),
    )


def models_of(_tenant: str) -> Sequence[ModelVersion]:
    """Two models."""
    return (
        ModelVersion(MODEL, "1", "gpu", "torch-lm", ("generate",), "m", 2_048, 512),
        ModelVersion(EMBEDDER, "1", "cpu", "torch-embed", ("embed",), "e", 512, 0),
    )


def may_name(tenant: str, reference: str) -> bool:
    """These models, and their champions."""
    return reference.removesuffix("@champion") in {model.model for model in models_of(tenant)}


def accept(_tenant: str, _request: InferenceRequest) -> None:
    """Nothing is kept of an accepted request."""


async def authenticate(request: Request) -> Identity:
    """By a key."""
    identity = _IDENTITIES.get(request.headers.get("authorization", "").removeprefix("Bearer "))
    if identity is None:
        raise GatewayError(401, "unauthenticated", "no identity")
    return identity


def build(submitter: ScriptedSubmitter, *, wait_s: float = 60.0, keep_alive_s: float = 60.0) -> FastAPI:
    """The routes."""
    app = FastAPI()
    install(app)
    idempotency = Idempotency(LocalClaims(), submitter.find_reply)
    deps = OpenAIDeps(
        submitter,  # type: ignore[arg-type]  # a double
        authenticate,
        idempotency,
        wait_s,
        accept,
        models_of=models_of,
        may_name=may_name,
        keep_alive_s=keep_alive_s,
    )
    app.include_router(router(deps))
    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, name="openai-routes", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, what="the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
