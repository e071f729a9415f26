"""OpenAI's files and batches, by OpenAI's own client, over real Kafka, Postgres, dispatcher and consumer."""

import json
from collections.abc import Iterator

import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from fairlane.api_keys.roles import Role
from producers.backfill.reply_reader import reply_partitions
from producers.gateway.errors import GatewayError
from producers.gateway.identity.principal import Identity
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.openai.batch_router import router
from producers.gateway.openai.errors import error_response
from tests.integration.backfill_bench import BackfillBench, backfill_bench
from tests.integration.pipeline import Pipeline, unique_name
from tests.stack import PostgresServer

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def bench(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackfillBench]:
    folder = tmp_path_factory.mktemp("batches")
    with Pipeline(broker, folder, unique_name()) as pipeline:
        pipeline.start()
        with backfill_bench(pipeline, postgres, folder) as made:
            yield made


@pytest.fixture(scope="module")
def http(bench: BackfillBench) -> Iterator[TestClient]:
    """The routes; whose key begins with a tenant's short name is that tenant."""

    async def authenticate(request: Request) -> Identity:
        name = request.headers["authorization"].removeprefix("Bearer ")
        return Identity(bench.pipeline.tenant(name), name, Role.TENANT)

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return error_response(error)

    app = FastAPI()
    app.add_exception_handler(GatewayError, refused)
    files = str(bench.folder / "files")
    app.include_router(
        router(BatchDeps(authenticate, bench.database.dsn, files, lambda: reply_partitions(bench.settings)))
    )
    with TestClient(app, base_url="http://gateway") as client:
        yield client


def client_of(http: TestClient, tenant: str) -> OpenAI:
    return OpenAI(base_url="http://gateway/v1", api_key=tenant, http_client=http, max_retries=0)


def lines(bench: BackfillBench, count: int) -> bytes:
    model = bench.pipeline.model_for("generate")
    body = {"model": model, "messages": [{"role": "user", "content": "why?"}], "max_tokens": 3}
    entries = [
        {"custom_id": f"c-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(count)
    ]
    entries[1] |= {"url": "/v1/completions"}
    return b"\n".join(json.dumps(entry).encode() for entry in entries)


def test_a_batch_from_upload_to_answers(bench: BackfillBench, http: TestClient) -> None:
    client = client_of(http, "a")
    file = client.files.create(file=("questions.jsonl", lines(bench, 12)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("questions.jsonl", "batch", len(lines(bench, 12)))
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "1"}
    )
    assert (batch.status, batch.output_file_id, batch.metadata) == ("validating", None, {"night": "1"})

    job = bench.store.find(batch.id.removeprefix("batch_"))
    assert job is not None
    bench.run(job)

    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 12, "completed": 11, "failed": 1}
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c-{number}" for number in range(12) if number != 1]
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    (failed,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("c-1", 400)
    assert {entry.id for entry in client.files.list()} >= {file.id, done.output_file_id, done.error_file_id}
    uploaded = {entry.id for entry in client.files.list(purpose="batch")}
    assert file.id in uploaded
    assert not uploaded & {done.output_file_id, done.error_file_id}
    assert batch.id in {entry.id for entry in client.batches.list(limit=1)}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_that_is_cancelled_before_anybody_runs_it(bench: BackfillBench, http: TestClient) -> None:
    client = client_of(http, "a")
    file = client.files.create(file=("q.jsonl", lines(bench, 3)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_another_tenant_finds_nothing(bench: BackfillBench, http: TestClient) -> None:
    file = client_of(http, "a").files.create(file=("q.jsonl", lines(bench, 3)), purpose="batch")
    other = client_of(http, "b")
    for ask in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"),
        lambda: other.batches.retrieve("batch_" + "0" * 16),
        lambda: other.files.retrieve("file-../../a"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert file.id not in {entry.id for entry in other.files.list()}


def test_bad_calls_name_the_field(http: TestClient) -> None:
    client = client_of(http, "a")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("q.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(input_file_id="file-1", endpoint="/v1/embeddings", completion_window="1h")  # type: ignore[arg-type]  # wrong on purpose
    answer = http.post("/v1/files", content=b"no form", headers={"authorization": "Bearer a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"


def test_nothing_of_a_file_is_outside_its_tenants_folder(bench: BackfillBench, http: TestClient) -> None:
    file = client_of(http, "a").files.create(file=("../../q.jsonl", lines(bench, 3)), purpose="batch")
    files, own = bench.folder / "files", bench.pipeline.tenant("a")
    assert (files / own / file.id).is_file()
    assert {path.name for path in files.iterdir()} <= {own, bench.pipeline.tenant("b")}
