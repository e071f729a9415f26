"""OpenAI's files and batches, by OpenAI's own client, with the services of the stack and nobody's help."""

import json
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from deploy.local.services import default_services
from fairlane.names import backfill_topic
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.kit.gateway_kit import Served, serving
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

FINAL = {"completed", "failed", "expired", "cancelled"}
END_S = 180.0


@pytest.fixture(scope="module")
def served(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    with serving(broker, postgres, folder, env={"FILES_URL": str(folder / "files")}, recorder=False) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        yield served


@pytest.fixture
def runner(served: Served) -> Iterator[ServiceProcess]:
    """The one of the stack, which is left as it is told to be left."""
    (service,) = [one for one in default_services() if "producers.backfill" in one.arguments]
    process = served.pipeline.launch(replace(service, env={"POSTGRES_DSN": served.database.backfill_dsn}))
    yield process.wait_ready()
    assert process.stop() == 0, process.last_words()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served, "a") as made:
        yield made


def client_of(served: Served, tenant: str) -> OpenAI:
    """To be closed."""
    return OpenAI(base_url=served.url("/v1"), api_key=served.keys[tenant], max_retries=0)


def lines(served: Served, count: int) -> bytes:
    model = served.pipeline.model_for("generate")
    body = {"model": model, "messages": [{"role": "user", "content": "why?"}], "max_tokens": 3}
    entries = [
        {"custom_id": f"c-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(count)
    ]
    entries[1] |= {"url": "/v1/completions"}
    return b"\n".join(json.dumps(entry).encode() for entry in entries)


def ended(client: OpenAI, batch: Batch) -> Batch:
    """What became of it."""
    eventually(lambda: client.batches.retrieve(batch.id).status in FINAL, END_S, "the end of the batch")
    return client.batches.retrieve(batch.id)


def test_a_batch_from_upload_to_answers(served: Served, client: OpenAI, runner: ServiceProcess) -> None:
    file = client.files.create(file=("questions.jsonl", lines(served, 12)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("questions.jsonl", "batch", len(lines(served, 12)))
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "1"}
    )
    assert (batch.status, batch.output_file_id, batch.metadata) == ("validating", None, {"night": "1"})

    done = ended(client, batch)
    assert done.status == "completed", runner.last_words()
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
    assert runner.metric("fairlane_backfill_rows_total", outcome="ok") == 11


def test_a_batch_whose_file_was_deleted_fails_and_says_so(
    served: Served, client: OpenAI, runner: ServiceProcess, request: pytest.FixtureRequest
) -> None:
    runner.pause()
    request.addfinalizer(runner.resume)
    file = client.files.create(file=("q.jsonl", lines(served, 3)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.files.delete(file.id).deleted
    runner.resume()

    failed = ended(client, batch)

    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert failed.errors is not None
    (error,) = failed.errors.data or []
    assert "there is no such file" in (error.message or "")


def test_a_batch_that_is_cancelled_before_anybody_runs_it(served: Served, client: OpenAI) -> None:
    file = client.files.create(file=("q.jsonl", lines(served, 3)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_that_is_cancelled_while_it_runs(served: Served, client: OpenAI, runner: ServiceProcess) -> None:
    file = client.files.create(file=("q.jsonl", lines(served, 8)), purpose="batch")
    topic = served.pipeline.reader(backfill_topic(served.pipeline.tenant("a")), from_beginning=False)
    with served.engines_paused():
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert (batch.status, batch.in_progress_at) == ("validating", None)
        eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", what="the batch to be counted")
        begun = client.batches.retrieve(batch.id)
        assert begun.in_progress_at is not None
        assert begun.expires_at == batch.expires_at == batch.created_at + 86_400
        topic.wait(lambda: len(topic.records) == 7, what="the rows that can be run")
        cancelled = client.batches.cancel(batch.id)
        assert (cancelled.status, cancelled.cancelled_at, cancelled.finalizing_at) == ("cancelling", None, None)
        assert cancelled.cancelling_at is not None
        # Until then its runner may not have heard of it.
        topic.wait(lambda: len(topic.records) == 2 * 7, what="their cancels")

    done = ended(client, batch)

    assert done.status == "cancelled", runner.last_words()
    assert (done.in_progress_at, done.cancelling_at) == (begun.in_progress_at, cancelled.cancelling_at)
    assert done.finalizing_at is not None
    assert done.cancelled_at is not None
    assert cancelled.cancelling_at <= done.finalizing_at <= done.cancelled_at


def test_a_batch_that_nobody_began_in_time(
    served: Served, client: OpenAI, runner: ServiceProcess, request: pytest.FixtureRequest
) -> None:
    runner.pause()
    request.addfinalizer(runner.resume)
    file = client.files.create(file=("q.jsonl", lines(served, 4)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    with connect(served.database.owner_dsn, "test", autocommit=True) as connection, connection.transaction():
        act_for(connection, ALL_TENANTS)
        connection.execute(
            "UPDATE backfill_jobs SET created_at_ms = created_at_ms - %(day_ms)s, "
            "deadline_at_ms = deadline_at_ms - %(day_ms)s WHERE job_id = %(job_id)s",
            {"day_ms": 86_400_000, "job_id": batch.id.removeprefix("batch_")},
        )
    runner.resume()

    done = ended(client, batch)

    assert (done.status, done.expires_at) == ("expired", done.created_at + 86_400), runner.last_words()
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 0, "failed": 4}
    assert done.output_file_id is None
    assert done.error_file_id is not None
    errors = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
    assert [entry["error"] and entry["error"]["code"] for entry in errors] == [
        "batch_expired",
        None,
        *["batch_expired"] * 2,
    ]


def test_another_tenant_finds_nothing(served: Served, client: OpenAI) -> None:
    file = client.files.create(file=("q.jsonl", lines(served, 3)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    with client_of(served, "b") as other:
        for ask in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.list(after=batch.id),
            lambda: other.batches.retrieve("batch_" + "0" * 16),
            lambda: other.files.retrieve("file-../../a"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert file.id not in {entry.id for entry in other.files.list()}
        assert batch.id not in {entry.id for entry in other.batches.list()}
    assert client.batches.retrieve(batch.id).status == "validating"
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_bad_calls_name_the_field(served: Served, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("q.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(input_file_id="file-1", endpoint="/v1/embeddings", completion_window="1h")  # type: ignore[arg-type]  # wrong on purpose
    with served.client() as caller:
        answer = caller.post("/v1/files", content=b"no form")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"


def test_nothing_of_a_file_is_outside_its_tenants_folder(served: Served, client: OpenAI) -> None:
    file = client.files.create(file=("../../q.jsonl", lines(served, 3)), purpose="batch")
    files, own = served.pipeline.folder / "files", served.pipeline.tenant("a")
    assert (files / own / file.id).is_file()
    assert {path.name for path in files.iterdir()} <= {own, served.pipeline.tenant("b")}
