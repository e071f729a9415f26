"""Documents and conversations with the services of the stack: from an upload to an answer, and from an answer to its
erasure."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deploy.local.services import default_services
from deploy.models.prepare import DEFAULT_MODELS_DIR
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.kit.gateway_kit import LONG_MS, Served
from tests.kit.pdf_kit import pdf
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model]

FORMATS = {
    "vault.txt": b"The vault of the north depot is opened by the duty engineer with a brass key.",
    "lunch.md": b"# Canteen\n\nLunch is served in the canteen from noon until two, on Fridays with fish.",
    "bikes.html": b"<!doctype html><h1>Bicycles</h1><p>Bicycles stand under the green roof behind the workshop.</p>",
    "ferry.pdf": pdf("The ferry to the island leaves at seven, and returns at nine."),
}
QUESTIONS = {
    "vault.txt": "Who opens the vault of the depot?",
    "lunch.md": "When is lunch served in the canteen?",
    "bikes.html": "Where do bicycles stand?",
    "ferry.pdf": "When does the ferry to the island leave?",
}
SECRET = "zebrafinch"


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, unique = tmp_path_factory.mktemp("documents"), unique_name()
    with migrated_database(postgres, unique) as database:
        env = {
            "POSTGRES_DSN": database.dispatcher_dsn,
            "FILES_URL": str(folder / "files"),
            "MODELS_DIR": str(DEFAULT_MODELS_DIR),
            # The promise of the default budget is measured elsewhere.
            "RETRIEVAL_BUDGET_MS": "5000",
        }
        with Pipeline(broker, folder, unique, redis_url=redis_url, env=env) as pipeline:
            with ApiKeys(database.owner_dsn) as keys:
                issued = {name: keys.create(pipeline.tenant(name), "tests").text for name in ("a", "b")}
            made = Served(pipeline, database, issued)
            gateway = made.gateway()
            pipeline.recorder(postgres_dsn=database.recorder_dsn)
            pipeline.start()
            gateway.wait_ready()
            yield made
            for process in pipeline.processes.values():
                process.stop()


@contextmanager
def ingesting(served: Served) -> Iterator[ServiceProcess]:
    """The ingest process of the stack."""
    (service,) = [one for one in default_services() if "producers.ingest" in one.arguments]
    process = served.pipeline.launch(replace(service, env={"POSTGRES_DSN": served.database.ingest_dsn}))
    process.wait_ready()
    try:
        yield process
    finally:
        if process.alive:
            assert process.stop() == 0, process.last_words()


def made_collection(client: httpx.Client, name: str) -> str:
    def is_made() -> bool:
        # The embedder is announced when it is loaded.
        return client.post("/v1/collections", json={"name": name}).status_code in (201, 409)

    eventually(is_made, what="a collection")
    return f"/v1/collections/{name}/documents"


def uploaded(client: httpx.Client, path: str, name: str, content: bytes) -> str:
    answer = client.post(path, files={"file": (name, content)})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def statuses(client: httpx.Client, path: str) -> dict[str, str]:
    return {one["name"]: one["status"] for one in client.get(path, params={"limit": 100}).json()["data"]}


def asked(served: Served, client: httpx.Client, question: str, collection: str) -> httpx.Response:
    """The answer to a question about a collection."""
    body = served.question(question) | {"retrieval": {"collection": collection, "top_k": 1}, "timeout_ms": LONG_MS}
    return client.post("/v1/requests", params={"wait": 60}, json=body)


def passages(served: Served, client: httpx.Client, question: str, collection: str) -> list[str]:
    """The documents that an answer is from."""
    result = asked(served, client, question, collection)
    assert result.status_code == 200, result.text
    ids = [passage["passage_id"] for passage in result.json().get("passages", ())]
    return [passage_id.removeprefix(f"{collection}/").partition("#")[0] for passage_id in ids]


def test_a_document_of_each_format_is_uploaded_answered_from_and_deleted(served: Served) -> None:
    with served.client("a") as client, served.client("b") as other, ingesting(served):
        path = made_collection(client, "handbook")
        ids = {name: uploaded(client, path, name, content) for name, content in FORMATS.items()}
        eventually(lambda: set(statuses(client, path).values()) == {"done"}, what="the ingestion")
        assert set(statuses(client, path)) == set(FORMATS)
        for name, question in QUESTIONS.items():
            # The first question may come while the dispatcher's embedder is still being loaded.
            eventually(lambda: passages(served, client, question, "handbook") == [name], what=name)  # noqa: B023
        refused = asked(served, other, QUESTIONS["vault.txt"], "handbook")
        assert refused.json()["error"]["message"] == "there is no such collection"
        for document_id in ids.values():
            assert client.delete(f"{path}/{document_id}").status_code == 200
        assert statuses(client, path) == {}
        for question in QUESTIONS.values():
            # A dispatcher looks the collection up anew after a second.
            eventually(lambda: passages(served, client, question, "handbook") == [], what="nothing")  # noqa: B023


def test_a_killed_ingest_process_is_continued_by_the_next_one(served: Served) -> None:
    text = b"".join(b"# Part %d\n\nThe lighthouse has a lamp of word%d.\n\n" % (n, n) for n in range(12_000))
    with served.client("a") as client:
        with ingesting(served) as process:
            path = made_collection(client, "large")
            uploaded(client, path, "large.md", text)
            eventually(lambda: statuses(client, path) == {"large.md": "running"}, what="its start")
            process.kill()
        assert statuses(client, path) == {"large.md": "running"}
        with connect(served.database.owner_dsn, "test") as connection:
            # Instead of waiting for 30 s.
            act_for(connection, ALL_TENANTS)
            connection.execute("UPDATE document_uploads SET lease_until = now()")
        with ingesting(served):
            eventually(lambda: statuses(client, path) == {"large.md": "done"}, timeout_s=120, what="its end")
        collection = client.get("/v1/collections/large").json()
        assert (collection["documents"], collection["passages"]) == (1, 12_000)
        assert client.delete("/v1/collections/large").status_code == 200


def said(served: Served, client: httpx.Client, conversation: str, text: str) -> str:
    body = served.question(text) | {"conversation_id": conversation, "timeout_ms": LONG_MS}
    result = client.post("/v1/requests", params={"wait": 60}, json=body)
    assert result.status_code == 200, result.text
    return str(result.json()["id"])


def turns(client: httpx.Client, conversation: str) -> list[str]:
    answer = client.get(f"/v1/conversations/{conversation}")
    return [turn["messages"][-1]["content"] for turn in answer.json()["data"]] if answer.status_code == 200 else []


def test_an_erased_conversation_stays_erased_when_the_projection_is_rebuilt(served: Served) -> None:
    with served.client("a") as client:
        ids = [said(served, client, "orders", f"{SECRET} {number}") for number in range(2)]
        said(served, client, "bills", "parrot")
        eventually(lambda: len(turns(client, "orders")) == 2 and len(turns(client, "bills")) == 1, what="the turns")
        erasure = client.delete("/v1/conversations/orders").json()
        assert (erasure["status"], erasure["erased"]) == ("done", {"turns": 2, "results": 2})
        assert erasure["gone_by_ms"] > 1_000 * time.time()
        assert in_postgres(served, SECRET) == []
        # Nor in the memory of this gateway, or in Redis. Decisions are kept.
        eventually(lambda: are_erased(client, ids), what="the end of the requests")
        with served.client("b") as other:
            assert [other.get(f"/v1/results/{one}").json()["error"]["code"] for one in ids] == ["unknown_request"] * 2
        recorder = served.pipeline.processes["recorder-1"]
        assert recorder.stop() == 0
        with connect(served.database.owner_dsn, "test") as connection:
            connection.execute("TRUNCATE results, conversation_turns, usage, audit_logs, source_offsets")
        assert turns(client, "bills") == []
        recorder.start()
        eventually(lambda: turns(client, "bills") == ["parrot"], what="the rebuilt projection")
        assert turns(client, "orders") == []
        assert in_postgres(served, SECRET) == []
        eventually(lambda: are_erased(client, ids), what="their decisions, read again")
        said(served, client, "orders", "hello again")
        eventually(lambda: turns(client, "orders") == ["hello again"], what="the new turn")


def are_erased(client: httpx.Client, request_ids: Sequence[str]) -> bool:
    results = [client.get(f"/v1/results/{one}") for one in request_ids]
    states = [client.get(f"/v1/requests/{one}").json() for one in request_ids]
    return all(
        (result.status_code, result.json().get("error", {}).get("code")) == (404, "result_erased")
        and (state.get("status"), state.get("is_erased")) == ("done", True)
        for result, state in zip(results, states, strict=True)
    )


def in_postgres(served: Served, word: str) -> list[str]:
    """The tables with a word in any column."""
    found: list[str] = []
    with connect(served.database.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        tables: list[tuple[Any, ...]] = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
        ).fetchall()
        for (table,) in tables:
            query = f"SELECT count(*) FROM {table} AS t WHERE t::text LIKE %s"  # noqa: S608 - a name of the catalogue
            row = connection.execute(query.encode(), (f"%{word}%",)).fetchone()
            if row is not None and row[0]:
                found.append(table)
    return found
