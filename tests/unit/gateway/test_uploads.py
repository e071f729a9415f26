"""Uploads: no way to break the gateway, to leave a file behind, or to keep another tenant's from being answered."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import pytest
from anyio import to_thread
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from fairlane_server.api_keys.api_key import Role
from producers.backfill.batches import QuotaReachedError, StoredFile
from producers.backfill.errors import UnavailableError
from producers.backfill.files import LocalFile
from producers.gateway.edge.error_responses import install
from producers.gateway.identity.identity import Identity
from producers.gateway.openai import batch_deps
from producers.gateway.openai.batch_deps import (
    MOST_CALLS,
    MOST_CALLS_OF_TENANT,
    MOST_TRANSFERS,
    MOST_TRANSFERS_OF_TENANT,
    BatchDeps,
    FileLimits,
)
from producers.gateway.openai.batches import router
from producers.gateway.openai.files import stored_name
from tests.kit.waiting import eventually

TENANT = "acme"
NOW_MS = 1_760_000_000_000
TTL_S = 7_200
WAIT_S = 60


class Kept:
    """Files that were registered; like Postgres, none whose name is no text."""

    coming: dict[str, StoredFile]
    files: list[StoredFile]
    answers: Event
    waiting: list[str]

    def __init__(self, _dsn: str, tenant: str) -> None:
        self._tenant = tenant

    def reserve_file(self, file: StoredFile, until_ms: int, most_files: int, most_bytes: int) -> None:
        assert until_ms > NOW_MS
        file.filename.encode()
        assert "\x00" not in file.filename
        if len(self.files) >= most_files or (file.size_bytes or 0) > most_bytes:
            raise QuotaReachedError(
                f"a tenant keeps at most {most_files} uploaded files, and {len(self.files)} are there"
            )
        self.coming[file.file_id] = file
        if self._tenant == TENANT:
            self._wait()

    def resize_upload(self, file: StoredFile, most_bytes: int) -> bool:
        assert (file.size_bytes or 0) <= most_bytes
        file.filename.encode()
        assert "\x00" not in file.filename
        self.coming[file.file_id] = file
        return True

    def settle_upload(self, file: StoredFile) -> bool:
        self.files.append(file)
        return self.coming.pop(file.file_id, None) is not None

    def remove_file(self, file_id: str) -> None:
        del self.coming[file_id]

    def file(self, _file_id: str, _now_ms: int) -> StoredFile | None:
        self._wait()
        return None

    def _wait(self) -> None:
        self.waiting.append(self._tenant)
        assert self.answers.wait(WAIT_S)

    def close(self) -> None: ...


@pytest.fixture
def http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    async def authenticate(request: Request) -> Identity:
        return Identity(request.headers.get("tenant", TENANT), "key", Role.TENANT)

    for name, value in {"coming": {}, "files": [], "waiting": [], "answers": Event()}.items():
        monkeypatch.setattr(Kept, name, value, raising=False)
    Kept.answers.set()
    monkeypatch.setattr(batch_deps, "BatchStore", Kept)
    app = FastAPI()
    install(app)
    limits = FileLimits(most_files=8, ttl_s=TTL_S)
    app.include_router(router(BatchDeps(authenticate, "", str(tmp_path), lambda: 1, lambda: NOW_MS, limits)))
    with TestClient(app, base_url="http://gateway", raise_server_exceptions=False) as client:
        yield client


def upload(http: TestClient, charset: str = "utf-8", filename: bytes = b"q.jsonl", **more: str) -> tuple[int, Any]:
    fields = {"purpose": "batch", **{f"expires_after[{name}]": value for name, value in more.items()}}
    parts = [
        f'--edge\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    body = (
        b"".join(parts)
        + b'--edge\r\ncontent-disposition: form-data; name="file"; filename="'
        + filename
        + b'"\r\n\r\n{}\r\n--edge--\r\n'
    )
    headers = {"content-type": f"multipart/form-data; boundary=edge; charset={charset}"}
    answer = http.post("/v1/files", content=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("charset", "filename"), [("idna", b"xn--99999999"), ("undefined", b"q.jsonl")])
def test_a_charset_that_decodes_no_text_is_a_bad_form(
    http: TestClient, charset: str, filename: bytes, tmp_path: Path
) -> None:
    status, said = upload(http, charset, filename)

    assert status == 400
    assert said["error"]["param"] == "file"
    assert not list(tmp_path.rglob("*"))


def test_a_name_with_half_a_character_is_kept_without_it(http: TestClient) -> None:
    status, said = upload(http, "utf-7", b"a+2AA-b.jsonl")

    assert status == 200
    assert said["filename"] == "a\ufffdb.jsonl"
    assert [file.filename for file in Kept.files] == ["a\ufffdb.jsonl"]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, "batch.jsonl"),
        ("a\x00b", "a\u2400b"),
        ("é" * 300, "é" * 256),
        ("\ud83d\ude00", "😀"),
    ],
)
def test_a_name_is_one_that_can_be_stored(given: str | None, stored: str) -> None:
    assert stored_name(given) == stored


def test_a_file_is_kept_as_long_as_is_asked_and_no_longer_than_is_set(http: TestClient) -> None:
    assert upload(http)[1]["expires_at"] == NOW_MS // 1_000 + TTL_S
    status, said = upload(http, anchor="created_at", seconds="3600")
    assert (status, said["expires_at"]) == (200, NOW_MS // 1_000 + 3_600)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"anchor": "created_at"}, "seconds"),
        ({"seconds": "3600"}, "anchor"),
        ({"anchor": "last_active_at", "seconds": "3600"}, "anchor"),
        ({"anchor": "created_at", "seconds": "3599"}, "seconds"),
        ({"anchor": "created_at", "seconds": "7201"}, "seconds"),
        ({"anchor": "created_at", "seconds": "-1"}, "seconds"),
    ],
)
def test_a_time_to_keep_a_file_that_is_none_names_the_field(
    http: TestClient, asked: dict[str, str], field: str, tmp_path: Path
) -> None:
    status, said = upload(http, "utf-8", b"q.jsonl", **asked)

    assert (status, said["error"]["param"]) == (400, f"expires_after.{field}")
    assert not list(tmp_path.rglob("*"))


def test_a_tenant_that_keeps_as_much_as_it_may_is_told_the_limit(http: TestClient, tmp_path: Path) -> None:
    for _ in range(8):
        assert upload(http)[0] == 200
    status, said = upload(http)

    assert (status, said["error"]["code"], said["error"]["param"]) == (403, "insufficient_quota", "file")
    assert "at most 8 uploaded files" in said["error"]["message"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 8


def test_what_cannot_be_stored_has_no_place_in_the_quota(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise UnavailableError("the storage is away")

    monkeypatch.setattr(LocalFile, "write", away)

    assert upload(http)[0] == 503
    assert (Kept.coming, Kept.files) == ({}, [])


def test_what_may_have_been_stored_is_deleted_or_keeps_its_place_for_the_sweep(
    http: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = LocalFile.write

    def away(*_: object) -> None:
        raise UnavailableError("the storage is away")

    def write_and_say_nothing(self: LocalFile, blocks: Iterable[bytes]) -> None:
        write(self, blocks)
        away()

    monkeypatch.setattr(LocalFile, "write", write_and_say_nothing)
    assert upload(http)[0] == 503
    assert (Kept.coming, [path for path in tmp_path.rglob("*") if path.is_file()]) == ({}, [])

    monkeypatch.setattr(LocalFile, "delete", away)
    assert upload(http)[0] == 503
    (kept,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert set(Kept.coming) == {kept.name}


def test_the_calls_of_one_tenant_leave_threads_to_others(http: TestClient) -> None:
    """As many of its calls as may be wait for Postgres: more are refused, and another tenant is answered."""
    Kept.answers.clear()
    path = f"/v1/files/file-{'0' * 24}"
    with ThreadPoolExecutor(MOST_CALLS_OF_TENANT + MOST_TRANSFERS_OF_TENANT) as threads:
        calls = [threads.submit(http.get, path) for _ in range(MOST_CALLS_OF_TENANT)]
        uploads = [threads.submit(upload, http) for _ in range(MOST_TRANSFERS_OF_TENANT)]
        eventually(lambda: len(Kept.waiting) == len(calls) + len(uploads), WAIT_S)
        try:
            refused, refused_upload = http.get(path), upload(http)
            others = upload_of_other(http)
        finally:
            Kept.answers.set()
        assert {call.result().status_code for call in calls} == {404}
        assert {done.result()[0] for done in uploads} == {200}
    assert refused.status_code == refused_upload[0] == 429
    assert f"at most {MOST_CALLS_OF_TENANT} calls" in refused.json()["error"]["message"]
    assert f"at most {MOST_TRANSFERS_OF_TENANT} uploads" in refused_upload[1]["error"]["message"]
    assert int(refused.headers["retry-after-ms"]) > 0
    assert others == 200
    assert http.get(path).status_code == 404, "those that were answered have given back their place"


def upload_of_other(http: TestClient) -> int:
    form = {"purpose": "batch"}
    return http.post("/v1/files", data=form, files={"file": b"{}"}, headers={"tenant": "globex"}).status_code


def test_files_never_have_all_threads() -> None:
    async def threads() -> float:
        return to_thread.current_default_thread_limiter().total_tokens

    assert anyio.run(threads) > MOST_CALLS + MOST_TRANSFERS
