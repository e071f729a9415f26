"""Collections, conversations and erasures on a real Postgres, held against the gateway's OpenAPI document."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from schemathesis import GenerationMode

from fairlane_server.redis.cache import RedisCache
from fairlane_server.topics.families import load_families
from producers.gateway.conversations.deps import ConversationDeps
from producers.gateway.documents.deps import DocumentDeps
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.results.request_store import RequestStore
from producers.gateway.results.results import Results
from tests.kit.documents_kit import DocumentsBench
from tests.kit.erasure_kit import LIVES, ErasureBench, reply
from tests.kit.native_kit import authenticate
from tests.kit.openapi_kit import CONVERSATIONS, DOCUMENTS, Probe, gateway, modes, probing
from tests.kit.stack import PostgresServer, migrated_database

EXAMPLES = 6


@pytest.fixture(scope="module")
def probe(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    folder: Path = tmp_path_factory.mktemp("documents")
    with migrated_database(postgres, "gateway_documents_openapi") as database:
        with DocumentsBench(database, folder).service():
            """It announces the embedder."""
        ErasureBench(database, "").record([reply("r-1", "orders-17", "why?", "so", 1)])
        dsn = database.gateway_dsn
        shared = BatchDeps(authenticate, dsn, str(folder), lambda: 1)
        documents = DocumentDeps(authenticate, dsn, str(folder), folder / "spool", shared.calls, shared.transfers)
        results = Results(RedisCache(None, 300), RequestStore(dsn))
        slots = (shared.calls, shared.transfers)
        conversations = ConversationDeps(authenticate, dsn, results, *slots, load_families(), LIVES)
        with probing(gateway(documents=documents, conversations=conversations)) as probe:
            yield probe


def test_the_way_of_a_document_is_as_it_says(probe: Probe) -> None:
    named = {"collection": "handbook"}
    made = probe.call(("POST", "/v1/collections"), body={"name": "handbook"}, media_type="application/json")
    assert made.status_code == 201
    path = "/v1/collections/{collection}/documents"
    body = {"file": b"# Returns", "name": "returns.md"}
    uploaded = probe.call(("POST", path), path_parameters=named, body=body, media_type="multipart/form-data").json()
    one = named | {"document_id": uploaded["id"]}
    assert probe.call(("GET", f"{path}/{{document_id}}"), path_parameters=one).json() == uploaded
    for route in ("/v1/collections", path):
        given = named if "{" in route else {}
        assert probe.call(("GET", route), path_parameters=given, query={"limit": 1}).json()["data"]
    assert probe.call(("DELETE", f"{path}/{{document_id}}"), path_parameters=one).json()["deleted"]
    assert probe.call(("DELETE", "/v1/collections/{collection}"), path_parameters=named).json()["deleted"]
    assert probe.call(("GET", "/v1/collections/{collection}"), path_parameters=named).status_code == 404


def test_the_way_of_an_erasure_is_as_it_says(probe: Probe) -> None:
    one = {"conversation_id": "orders-17"}
    path = "/v1/conversations/{conversation_id}"
    assert probe.call(("GET", "/v1/conversations")).json()["data"][0]["id"] == "orders-17"
    assert probe.call(("GET", path), path_parameters=one).json()["data"]
    assert probe.call(("GET", f"{path}/export"), path_parameters=one).status_code == 200
    erasure = probe.call(("DELETE", path), path_parameters=one).json()
    assert erasure["status"] == "done"
    known = {"erasure_id": erasure["id"]}
    assert probe.call(("GET", "/v1/erasures/{erasure_id}"), path_parameters=known).json() == erasure
    assert probe.call(("GET", "/v1/erasures"), query={"limit": 1}).json()["data"]


# schemathesis draws from `random` in its own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize(("method", "path", "mode"), modes(DOCUMENTS | CONVERSATIONS))
def test_whatever_comes_is_answered_as_it_says(probe: Probe, method: str, path: str, mode: GenerationMode) -> None:
    probe.search(method, path, mode, EXAMPLES)
