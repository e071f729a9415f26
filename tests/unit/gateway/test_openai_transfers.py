"""Uploads and downloads that take their time: nobody else waits for their place for ever."""

import asyncio
import os
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Message, Scope

from fairlane_server.api_keys.api_key import Role
from producers.backfill.batches import BatchStore, QuotaReachedError
from producers.backfill.files import LocalFile
from producers.gateway.edge import error_responses
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.batch_deps import MOST_TRANSFERS_OF_TENANT, BatchDeps
from producers.gateway.openai.batches import router
from producers.gateway.openai.files import _Download
from producers.gateway.received_forms import form_of

SCOPE: Scope = {
    "type": "http",
    "http_version": "1.1",
    "asgi": {"spec_version": "2.3"},
    "method": "POST",
    "path": "/v1/files",
    "query_string": b"",
    "headers": [(b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"100")],
}


async def authenticate(_request: Request) -> Identity:
    return Identity("acme", "key", Role.TENANT)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the place of an upload in the quota."""
    done: list[str] = []
    monkeypatch.setattr(BatchStore, "reserve_file", lambda *_: done.append("reserve"))
    monkeypatch.setattr(BatchStore, "remove_file", lambda *_: done.append("remove"))
    return done


def upload(deps: BatchDeps, *messages: Message, headers: Any = None) -> int:
    """The status of one of which no more comes than this."""
    app = FastAPI()
    error_responses.install(app)
    app.include_router(router(deps))
    coming = iter(messages)
    statuses: list[int] = []

    async def receive() -> Message:
        for message in coming:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = SCOPE if headers is None else {**SCOPE, "headers": headers}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60.0))
    if statuses[0] != 429:
        assert deps.transfers.total == 0
    return statuses[0]


def test_an_upload_that_comes_for_ever_gives_its_place_back(store: list[str], tmp_path: Path) -> None:
    deps = BatchDeps(authenticate, "", str(tmp_path), lambda: 1, transfer_s=0.05)
    assert upload(deps, {"type": "http.request", "body": b"--x\r\n", "more_body": True}) == 408
    assert store == ["reserve", "remove"]


def test_an_upload_that_breaks_off_is_no_error_of_ours(store: list[str], tmp_path: Path) -> None:
    deps = BatchDeps(authenticate, "", str(tmp_path), lambda: 1)
    begun: Message = {"type": "http.request", "body": b"--x\r\n", "more_body": True}
    assert upload(deps, begun, {"type": "http.disconnect"}) == 499
    assert store == ["reserve", "remove"]


def test_an_upload_has_its_place_before_any_of_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise QuotaReachedError("a tenant keeps at most 1 uploaded files, and 1 are there")

    monkeypatch.setattr(BatchStore, "reserve_file", full)
    deps = BatchDeps(authenticate, "", str(tmp_path), lambda: 1)
    assert upload(deps) == 403, "nothing came"
    for _ in range(MOST_TRANSFERS_OF_TENANT):
        deps.transfers.take("acme")
    assert upload(deps) == 429
    assert deps.transfers.total == MOST_TRANSFERS_OF_TENANT
    assert not list(tmp_path.iterdir())


def test_an_upload_of_unknown_length_is_refused(tmp_path: Path) -> None:
    deps = BatchDeps(authenticate, "", str(tmp_path), lambda: 1)
    assert upload(deps, headers=SCOPE["headers"][:1]) == 411


def test_a_file_goes_to_the_volume_of_the_files_as_it_comes(tmp_path: Path) -> None:
    files = tmp_path / "files"
    assert BatchDeps(authenticate, "", str(files), lambda: 1).spool_folder == files
    elsewhere = BatchDeps(authenticate, "", "s3://bucket", lambda: 1, spool_dir=tmp_path)
    assert elsewhere.spool_folder == tmp_path
    assert BatchDeps(authenticate, "", "s3://bucket", lambda: 1).spool_folder == Path(gettempdir())
    body = b'--x\r\ncontent-disposition: form-data; name="file"; filename="q"\r\n\r\n' + b"{}" + b"\r\n--x--\r\n"
    request = Request(SCOPE, partial(_whole, body))
    form = asyncio.run(form_of(request, files))
    file = form["file"]
    assert isinstance(file, UploadFile)
    try:
        assert file.file.read() == b"{}"
        assert os.fstat(file.file.fileno()).st_dev == files.stat().st_dev
        # It has no name: nothing is left of it, whatever becomes of the process.
        assert os.fstat(file.file.fileno()).st_nlink == 0
        assert not list(files.iterdir())
    finally:
        file.file.close()


async def _whole(body: bytes) -> Message:
    return {"type": "http.request", "body": body}


def test_a_download_that_is_taken_for_ever_gives_its_place_back(tmp_path: Path) -> None:
    deps = BatchDeps(authenticate, "", "", lambda: 1)
    path = tmp_path / "file"
    path.write_bytes(b"{}")
    blob = LocalFile(path)
    download = _Download(blob, blob.fingerprint(), deps.transfers.taken("acme"), 0.05)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            assert deps.transfers.total == 1
            await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(download(SCOPE, receive, send), 60.0))
    # Nothing after what was not taken: who reads it sees that it is not whole.
    assert [message["type"] for message in sent] in (
        ["http.response.start"],
        ["http.response.start", "http.response.body"],
    )
    assert deps.transfers.total == 0
