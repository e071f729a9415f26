"""The gateway as it is assembled, with scripted parts behind its routes, held against its own OpenAPI document."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fairlane.clock import now_ms
from fairlane.outcomes import Decision
from fairlane.settings import Settings
from producers.gateway import openapi
from producers.gateway.app import Gateway
from producers.gateway.conversations.deps import ConversationDeps
from producers.gateway.conversations.routes import router as conversation_router
from producers.gateway.documents.deps import DocumentDeps
from producers.gateway.documents.routes import router as document_router
from producers.gateway.idempotency import Idempotency, LocalClaims
from producers.gateway.native.routes import ShortPath
from producers.gateway.native.routes import router as native_router
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.openai.batches import router as batch_router
from producers.gateway.openai.router import router as openai_router
from producers.gateway.openai.streams import OpenAIDeps
from tests.kit.native_kit import KEY, Bench, authenticate, decided, recorded, used
from tests.kit.openai_kit import accept, may_name, models_of

Route = tuple[str, str]

NATIVE: frozenset[Route] = frozenset(
    {
        ("POST", "/v1/requests"),
        ("GET", "/v1/requests"),
        ("GET", "/v1/requests/{request_id}"),
        ("DELETE", "/v1/requests/{request_id}"),
        ("GET", "/v1/requests/{request_id}/events"),
        ("GET", "/v1/results/{request_id}"),
        ("POST", "/v1/rank"),
        ("POST", "/v1/classify"),
        ("POST", "/inference"),
        ("GET", "/results/{request_id}"),
        ("POST", "/v1/feedback"),
        ("GET", "/v1/usage"),
        ("GET", "/v1/budgets"),
    }
)
OPENAI: frozenset[Route] = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
    }
)
FILES: frozenset[Route] = frozenset(
    {
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/{file_id}"),
        ("DELETE", "/v1/files/{file_id}"),
        ("GET", "/v1/files/{file_id}/content"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/{batch_id}"),
        ("POST", "/v1/batches/{batch_id}/cancel"),
    }
)
"""They need a Postgres."""
DOCUMENTS: frozenset[Route] = frozenset(
    {
        ("POST", "/v1/collections"),
        ("GET", "/v1/collections"),
        ("GET", "/v1/collections/{collection}"),
        ("DELETE", "/v1/collections/{collection}"),
        ("POST", "/v1/collections/{collection}/documents"),
        ("GET", "/v1/collections/{collection}/documents"),
        ("GET", "/v1/collections/{collection}/documents/{document_id}"),
        ("DELETE", "/v1/collections/{collection}/documents/{document_id}"),
    }
)
"""They need a Postgres too."""
CONVERSATIONS: frozenset[Route] = frozenset(
    {
        ("GET", "/v1/conversations"),
        ("GET", "/v1/conversations/{conversation_id}"),
        ("DELETE", "/v1/conversations/{conversation_id}"),
        ("GET", "/v1/conversations/{conversation_id}/export"),
        ("POST", "/v1/erasures"),
        ("GET", "/v1/erasures"),
        ("GET", "/v1/erasures/{erasure_id}"),
    }
)
"""Likewise."""
HEALTH: frozenset[Route] = frozenset({("GET", "/health"), ("GET", "/health/ready")})

_TAKE_NOTHING = HEALTH | {("GET", "/v1/models"), ("GET", "/v1/budgets")}
HEADERS = {"authorization": f"Bearer {KEY}"}
_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def modes(routes: frozenset[Route]) -> list[tuple[str, str, GenerationMode]]:
    """Each route with calls that the document allows; and with others, where there are such: in a path any string may
    stand, and some take nothing."""
    return [
        *((*route, GenerationMode.POSITIVE) for route in sorted(routes)),
        *((*route, GenerationMode.NEGATIVE) for route in sorted(routes - _TAKE_NOTHING) if "{" not in route[1]),
    ]


def gateway(
    *,
    docs: bool = True,
    bench: Bench | None = None,
    batches: BatchDeps | None = None,
    documents: DocumentDeps | None = None,
    conversations: ConversationDeps | None = None,
) -> FastAPI:
    """The application of a gateway that connects to nothing; only routes with parts can be called.

    Args:
        docs: whether it shows its document.
        bench: behind its own routes and OpenAI's.
        batches: behind those of files and batches.
        documents: behind those of collections and documents.
        conversations: behind those of conversations and erasures.
    """
    routers: dict[str, Any] = {}
    if bench is not None:
        keys = Idempotency(LocalClaims(), bench.results.find_reply)
        openai = OpenAIDeps(
            bench.submitter,  # type: ignore[arg-type]  # a double
            authenticate,
            keys,
            bench.deps.wait_s,
            accept,
            models_of=models_of,
            may_name=may_name,
        )
        native = bench.deps
        routers |= {
            "native_router": lambda _own: native_router(native),
            "ShortPath": lambda app, **_own: ShortPath(app, native),
            "openai_router": lambda _own: openai_router(openai),
        }
    if batches is not None:
        routers["batch_router"] = lambda _own: batch_router(batches)
    if documents is not None:
        routers["document_router"] = lambda _own: document_router(documents)
    if conversations is not None:
        routers["conversation_router"] = lambda _own: conversation_router(conversations)
    with ExitStack() as patched:
        for name, make in routers.items():
            patched.enter_context(patch(f"producers.gateway.app.{name}", make))
        app = Gateway(Settings(redis_url=None, gateway_docs=docs)).app
    app.router.lifespan_context = (
        FastAPI().router.lifespan_context if bench is None else bench.app.router.lifespan_context
    )
    return app


def scripted() -> Bench:
    """With one request that ended, whose id the document has as an example."""
    bench = Bench(wait_s=1.0)
    bench.store.record(recorded(1, request_id=openapi.EXAMPLE_ID, at_ms=now_ms()))
    bench.store.use(used(1), used(2, nanos=None))
    bench.store.decide(decided(Decision.ACCEPTED, 1, request_id=openapi.EXAMPLE_ID))
    return bench


class Probe:
    """Calls of an application, each answer of which must be as its document says."""

    def __init__(self, app: FastAPI, client: Any) -> None:
        self.document = app.openapi()
        self._schema = schemathesis.openapi.from_dict(self.document)
        self._schema.app = app
        self._client = client

    def call(self, route: Route, **parts: Any) -> Any:
        """What a call with these ``path_parameters``, ``query``, ``body`` and ``media_type`` is answered."""
        method, path = route
        case = self._schema[path][method].Case(**parts)
        answer = case.call(headers=HEADERS, session=self._client)
        case.validate_response(answer, checks=_CHECKS)
        return answer

    def search(self, method: str, path: str, mode: GenerationMode, most_examples: int) -> None:
        """Look for a call that is answered otherwise, or that is answered to nobody."""
        operation = self._schema[path][method]
        # A gateway that is not ready says so with this.
        checks = _CHECKS[(method, path) in HEALTH :]

        @settings(
            derandomize=True,
            database=None,
            max_examples=most_examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case[Any]) -> None:
            answer = case.call(headers=HEADERS, session=self._client)
            case.validate_response(answer, checks=checks)
            if (method, path) not in HEALTH:
                # Who calls is asked before all else.
                assert case.call(session=self._client).status_code in (401, 404, 405, 413)

        check()


@contextmanager
def probing(app: FastAPI) -> Iterator[Probe]:
    """Calls within this process."""
    with asgi.get_client(app) as client:  # type: ignore[arg-type]  # it is one
        yield Probe(app, client)


def operations(document: Mapping[str, Any]) -> dict[Route, dict[str, Any]]:
    """All of a document."""
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
