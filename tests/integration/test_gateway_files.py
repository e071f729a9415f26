"""Uploaded files in a real Postgres: how many a tenant keeps, and for how long."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI
from starlette.requests import Request
from starlette.testclient import TestClient

from fairlane_server.api_keys.api_key import Role
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from producers.backfill.batches import BatchStore, FileSweep, StoredBatch, StoredFile
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import LocalFile
from producers.backfill.job import Status, Wanted
from producers.backfill.job_store import JobStore
from producers.backfill.outputs import FileParts
from producers.gateway.edge.error_responses import install
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.batch_deps import MOST_CALLS_OF_TENANT, MOST_TRANSFERS_OF_TENANT, BatchDeps, FileLimits
from producers.gateway.openai.batches import router
from tests.kit.stack import PostgresServer, migrated_database

DAY_S = 86_400
NAME = "q.jsonl"


@dataclass
class Bench:
    """The routes at a time that the test sets."""

    database: PostgresServer
    folder: Path
    now_ms: int = 1_760_000_000_000
    limits: FileLimits = field(default_factory=lambda: FileLimits(most_files=3, most_bytes=100, ttl_s=30 * DAY_S))

    def __post_init__(self) -> None:
        async def authenticate(request: Request) -> Identity:
            return Identity(request.headers["authorization"].removeprefix("Bearer "), "key", Role.TENANT)

        self.deps = BatchDeps(
            authenticate,
            self.database.gateway_dsn,
            str(self.folder),
            lambda: 4,
            clock_ms=lambda: self.now_ms,
            limits=self.limits,
        )
        self.file_sweep = FileSweep(
            self.database.backfill_dsn, str(self.folder), self.limits.ttl_s, lambda: self.now_ms
        )

    def app(self) -> FastAPI:
        app = FastAPI()
        install(app)
        app.include_router(router(self.deps))
        return app

    @contextmanager
    def client(
        self, tenant: str = "acme", client_class: type[TestClient] = TestClient, max_retries: int = 0
    ) -> Iterator[OpenAI]:
        with client_class(self.app(), base_url="http://gateway") as http:
            yield OpenAI(base_url="http://gateway/v1", api_key=tenant, http_client=http, max_retries=max_retries)

    def pass_days(self, days: float) -> int:
        """Let time pass, and sweep; how many files that removed."""
        self.now_ms += round(days * DAY_S * 1_000)
        return self.file_sweep.sweep()

    def stored(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*") if path.is_file()}

    def end_jobs(self, status: Status) -> None:
        with connect(self.database.owner_dsn, "test") as connection:
            act_for(connection, ALL_TENANTS)
            connection.execute("UPDATE backfill_jobs SET status = %s, ended_at_ms = %s", (status.value, self.now_ms))

    def made(self, batch_id: str) -> StoredBatch:
        """What is known of a batch."""
        with closing(BatchStore(self.database.gateway_dsn, "acme")) as store:
            made = store.batch(batch_id)
        assert made is not None
        return made

    def resume(self, batch_id: str) -> None:
        with closing(JobStore(self.database.backfill_dsn)) as jobs:
            assert jobs.steer(self.made(batch_id).job.job_id, Wanted.RUN, self.now_ms) is not None


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, "gateway_files") as database:
        yield database


@pytest.fixture
def bench(tables: PostgresServer, tmp_path: Path) -> Bench:
    """With no files in it."""
    with connect(tables.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        connection.execute("TRUNCATE batches, backfill_chunks, backfill_jobs, files")
    return Bench(tables, tmp_path)


def upload(client: OpenAI, content: bytes = b"{}") -> str:
    return client.files.create(file=(NAME, content), purpose="batch").id


def start(client: OpenAI, file_id: str, key: str | None = None, **fields: Any) -> str:
    asked: dict[str, Any] = {"endpoint": "/v1/embeddings", "completion_window": "24h", **fields}
    keyed = {} if key is None else {"Idempotency-Key": key}
    return client.batches.create(input_file_id=file_id, extra_headers=keyed, **asked).id


def test_a_tenant_keeps_so_many_files_and_so_many_bytes(bench: Bench) -> None:
    with bench.client() as client, bench.client("globex") as other:
        first = upload(client, b"x" * 60)
        with pytest.raises(
            openai.PermissionDeniedError, match="at most 100 bytes of uploaded files: 60 are there"
        ) as full:
            upload(client, b"x" * 41)
        assert full.value.code == "insufficient_quota"
        upload(client, b"x" * 40)
        upload(other, b"x" * 100)
        client.files.delete(first)
        upload(client)
        upload(client)
        with pytest.raises(openai.PermissionDeniedError, match="at most 3 uploaded files"):
            upload(client)
    assert len(bench.stored()) == 4


def test_uploads_at_the_same_time_do_not_exceed_the_quota(bench: Bench) -> None:
    def reserve(number: int) -> bool:
        store = BatchStore(bench.database.gateway_dsn, "acme")
        try:
            file = StoredFile(f"file-{number:024x}", "acme", "batch", NAME, 1, bench.now_ms, bench.now_ms + 1)
            store.reserve_file(file, bench.now_ms + 1, 3, 100)
        except Exception:  # noqa: BLE001 - counted
            return False
        finally:
            store.close()
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(reserve, range(8))) == 3


def test_an_expired_file_is_not_found_and_is_removed(bench: Bench) -> None:
    with bench.client() as client:
        soon = client.files.create(
            file=(NAME, b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
        )
        late = client.files.retrieve(upload(client))
        assert soon.expires_at == soon.created_at + 3_600
        assert late.expires_at == late.created_at + 30 * DAY_S
        bench.now_ms += 3_600_000
        for ask in (
            lambda: client.files.retrieve(soon.id),
            lambda: client.files.content(soon.id),
            lambda: client.files.delete(soon.id),
            lambda: client.batches.create(input_file_id=soon.id, endpoint="/v1/embeddings", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert [file.id for file in client.files.list()] == [late.id]
        assert bench.stored() == {soon.id, late.id}
        assert bench.pass_days(0) == 1
        assert bench.stored() == {late.id}
        assert bench.pass_days(30) == 1
        assert bench.stored() == set()
        assert bench.pass_days(30) == 0


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_what_a_batch_reads_and_writes_is_kept_while_it_goes_on_and_for_a_time_after(
    bench: Bench, status: Status
) -> None:
    with bench.client() as client:
        file = upload(client)
        made = bench.made(start(client, file))
        LocalFile(bench.folder / "acme" / made.output_file_id).write([b"answers"])
        assert client.files.retrieve(made.output_file_id).expires_at is None
        assert bench.pass_days(31) == 0, "it goes on"
        assert bench.stored() == {file, made.output_file_id}
        bench.end_jobs(status)
        input_is_kept = status is Status.FAILED
        assert bench.pass_days(0) == 1 - input_is_kept, "the input has expired; what failed can be resumed"
        assert client.files.retrieve(made.output_file_id).expires_at == bench.now_ms // 1_000 + 30 * DAY_S
        assert client.files.content(made.output_file_id).read() == b"answers"
        assert bench.pass_days(30) == 2 + input_is_kept, "the output, and an error file that was never written"
        assert bench.stored() == set()


def test_a_failed_batch_that_is_resumed_keeps_its_files_as_any_other(bench: Bench) -> None:
    with bench.client() as client:
        batch_id = start(client, upload(client))
    bench.end_jobs(Status.FAILED)
    assert bench.pass_days(29) == 0
    bench.resume(batch_id)
    assert bench.pass_days(31) == 0
    bench.end_jobs(Status.COMPLETED)
    assert bench.pass_days(0) == 1, "the input"
    assert bench.pass_days(29) == 0
    assert bench.pass_days(1) == 2


def test_the_parts_of_a_batch_that_failed_go_with_its_output(bench: Bench) -> None:
    with bench.client() as client:
        made = bench.made(start(client, upload(client)))
    parts = FileParts(made.job)
    parts.write(0, [])
    assert len(bench.stored()) == 2, "the input, and a part of the answers and the errors that has the same name"
    bench.end_jobs(Status.FAILED)
    bench.pass_days(0)
    assert bench.pass_days(30) == 3
    assert not bench.stored()
    assert not any((bench.folder / "acme").iterdir())


def test_what_is_used_again_after_the_sweep_saw_it_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.client() as client:
        file = upload(client)
        batch_id = start(client, file)
    made = bench.made(batch_id)
    bench.end_jobs(Status.FAILED)
    bench.pass_days(0)
    coming = StoredFile("file-" + "0" * 24, "acme", "batch", NAME, 9, bench.now_ms, bench.now_ms + 10**12)
    with closing(BatchStore(bench.database.gateway_dsn, "acme")) as store:
        store.reserve_file(coming, bench.now_ms + 1, 3, 100)
    seen = BatchStore.expired_files

    def used_again(self: BatchStore, *args: Any) -> list[StoredFile]:
        page = seen(self, *args)
        if page:
            assert {one.file_id for one in page} == {file, coming.file_id, made.output_file_id, made.error_file_id}
            bench.resume(batch_id)
            with closing(BatchStore(bench.database.gateway_dsn, "acme")) as store:
                assert store.settle_upload(coming)
        return page

    monkeypatch.setattr(BatchStore, "expired_files", used_again)
    assert bench.pass_days(30) == 0
    assert bench.stored() == {file}


def test_a_batch_is_not_made_of_a_file_that_has_gone_meanwhile(bench: Bench) -> None:
    def partitions() -> int:
        assert bench.pass_days(30) == 1
        return 4

    with bench.client() as client:
        file = upload(client)
        bench.deps = replace(bench.deps, reply_partitions=partitions)
    with bench.client() as client:
        with pytest.raises(openai.NotFoundError) as refused:
            start(client, file)
        assert refused.value.param == "input_file_id"
        assert not list(client.batches.list())


def test_a_batch_that_is_sent_again_under_its_key_is_the_same(bench: Bench) -> None:
    with bench.client() as client, bench.client("globex") as other:
        file, theirs = upload(client), upload(other)
        first = start(client, file, "night", metadata={"a": "b"})
        assert start(client, file, "night", metadata={"a": "b"}) == first
        for file_id, fields in (
            (file, {}),
            (file, {"metadata": {"a": "b"}, "endpoint": "/v1/completions"}),
            (upload(client), {"metadata": {"a": "b"}}),
        ):
            with pytest.raises(openai.UnprocessableEntityError) as reused:
                start(client, file_id, "night", **fields)
            assert reused.value.code == "idempotency_key_reused"
        assert len({first, start(client, file, "morning"), start(other, theirs, "night")}) == 3
        bench.end_jobs(Status.COMPLETED)
        client.files.delete(file)
        assert start(client, file, "night", metadata={"a": "b"}) == first, "what it read is gone, what it was is known"
        assert len(list(client.batches.list())) == 2


def test_a_key_is_free_where_no_batch_was_made(bench: Bench) -> None:
    with bench.client() as client:
        with pytest.raises(openai.NotFoundError):
            start(client, "file-" + "0" * 24, "night")
        assert start(client, upload(client), "night").startswith("batch_")


@pytest.mark.parametrize("same", [True, False])
def test_of_two_calls_under_one_key_at_a_time_one_makes_a_batch(bench: Bench, *, same: bool) -> None:
    quick, first = bench.deps, list[str]()

    def overtaken() -> int:
        # The other call comes after this one has looked for a batch, and before it makes one.
        bench.deps = quick
        with bench.client() as client:
            first.append(start(client, file, "night"))
        return 4

    with bench.client() as client:
        file = upload(client)
    bench.deps = replace(quick, reply_partitions=overtaken)
    with bench.client() as client:
        if same:
            assert [start(client, file, "night")] == first
        else:
            with pytest.raises(openai.UnprocessableEntityError):
                start(client, file, "night", metadata={"a": "b"})
        assert [batch.id for batch in client.batches.list()] == first


def test_of_many_calls_under_one_key_at_once_all_have_one_batch(bench: Bench) -> None:
    with bench.client() as client:
        file = upload(client)

    async def start_all() -> set[str]:
        # One event loop, as in the gateway: its slots are counted there.
        transport = httpx2.ASGITransport(bench.app())
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
            client = AsyncOpenAI(base_url="http://gateway/v1", api_key="acme", http_client=http, max_retries=0)
            calls = [
                client.batches.create(
                    input_file_id=file,
                    endpoint="/v1/embeddings",
                    completion_window="24h",
                    extra_headers={"Idempotency-Key": "night"},
                )
                for _ in range(MOST_CALLS_OF_TENANT)
            ]
            return {batch.id for batch in await asyncio.gather(*calls)}

    assert len(asyncio.run(start_all())) == 1


def test_a_call_that_is_not_told_of_its_batch_looks_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    add, made = BatchStore.add_batch, list[str]()

    def cut_off(self: BatchStore, batch: StoredBatch) -> bool:
        add(self, batch)
        made.append(batch.batch_id)
        raise UnavailableError("the connection broke")

    monkeypatch.setattr(BatchStore, "add_batch", cut_off)
    with bench.client() as client:
        assert [start(client, upload(client), "night")] == made
        assert [batch.id for batch in client.batches.list()] == made


def test_a_client_that_tries_again_by_itself_has_one_batch(bench: Bench) -> None:
    lost: list[str] = []

    class Losing(TestClient):
        def send(self, request: Any, **options: Any) -> Any:
            answer = super().send(request, **options)
            if request.method == "POST" and request.url.path == "/v1/batches" and not lost:
                lost.append(answer.json()["id"])
                raise httpx2.ReadError("the connection broke")
            return answer

    with bench.client(client_class=Losing, max_retries=1) as client:
        assert [start(client, upload(client), "night")] == lost
        assert [batch.id for batch in client.batches.list()] == lost


def test_a_batch_that_was_cancelled_before_is_told_as_it_is(bench: Bench) -> None:
    with bench.client() as client:
        made, ended = start(client, upload(client)), start(client, upload(client))
        assert [client.batches.cancel(made).status for _ in range(2)] == ["cancelled"] * 2
        bench.end_jobs(Status.COMPLETED)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(ended)


def test_an_upload_that_is_never_written_gives_its_place_back(bench: Bench) -> None:
    store = BatchStore(bench.database.gateway_dsn, "acme")
    coming = StoredFile("file-" + "0" * 24, "acme", "batch", NAME, 99, bench.now_ms, bench.now_ms + 10**9)
    store.reserve_file(coming, bench.now_ms + 3_600_000, 3, 100)
    with bench.client() as client:
        assert not list(client.files.list())
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(coming.file_id)
        with pytest.raises(openai.PermissionDeniedError):
            upload(client)
        assert bench.pass_days(1) == 1
        upload(client)
    assert not store.settle_upload(coming), "its place is gone"
    store.close()


def test_a_file_that_the_storage_keeps_stops_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = LocalFile.delete
    with bench.client() as client:
        files = [upload(client), upload(client), upload(client)]

        def refuse_one(self: LocalFile) -> None:
            if self._path.name == files[0]:
                raise JobFailedError("denied")
            delete(self)

        monkeypatch.setattr(LocalFile, "delete", refuse_one)
        monkeypatch.setattr("producers.backfill.batches._PAGE", 1)
        assert bench.pass_days(30) == 2
        assert bench.stored() == {files[0]}
        monkeypatch.undo()
        assert bench.pass_days(0) == 1


def test_a_sweep_can_be_stopped(bench: Bench) -> None:
    with bench.client() as client:
        upload(client)
    bench.now_ms += 30 * DAY_S * 1_000
    bench.file_sweep.start()
    bench.file_sweep.stop()
    assert bench.file_sweep.sweep() == 0
    assert len(bench.stored()) == 1


def test_a_download_too_many_is_refused_before_it_begins(bench: Bench) -> None:
    with bench.client() as client, ExitStack() as taken:
        file = upload(client)
        for _ in range(MOST_TRANSFERS_OF_TENANT):
            taken.enter_context(bench.deps.transfers.taken("acme"))
        with pytest.raises(openai.RateLimitError, match=f"at most {MOST_TRANSFERS_OF_TENANT} uploads and downloads"):
            client.files.content(file)
        taken.close()
        assert client.files.content(file).read() == b"{}"
        assert bench.deps.transfers.total == 0


def test_files_from_before_there_was_an_end_get_one(bench: Bench) -> None:
    with bench.client() as client:
        file = upload(client)
        with connect(bench.database.owner_dsn, "test") as connection:
            act_for(connection, ALL_TENANTS)
            connection.execute("UPDATE files SET expires_at_ms = NULL")
        assert bench.pass_days(100) == 0
        assert client.files.retrieve(file).expires_at == bench.now_ms // 1_000 + 30 * DAY_S
