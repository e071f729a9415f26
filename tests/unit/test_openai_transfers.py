"""Uploads and downloads that take their time: nobody else waits for their place for ever."""

import asyncio
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message, Scope

from fairlane.api_keys.roles import Role
from producers.backfill.files import LocalFile
from producers.gateway.edge import error_answers
from producers.gateway.identity.principal import Identity
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.openai.batch_router import router
from producers.gateway.openai.files import _Download

SCOPE: Scope = {
    "type": "http",
    "http_version": "1.1",
    "asgi": {"spec_version": "2.3"},
    "method": "POST",
    "path": "/v1/files",
    "query_string": b"",
    "headers": [(b"content-type", b"multipart/form-data; boundary=x")],
}


async def authenticate(_request: Request) -> Identity:
    return Identity("acme", "key", Role.TENANT)


def upload(deps: BatchDeps, *messages: Message) -> int:
    """The status of one of which no more comes than this."""
    app = FastAPI()
    error_answers.install(app)
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

    asyncio.run(asyncio.wait_for(app(SCOPE, receive, send), 60.0))
    assert deps.transfers.total == 0
    return statuses[0]


def test_an_upload_that_comes_for_ever_gives_its_place_back() -> None:
    deps = BatchDeps(authenticate, "", "", lambda: 1, transfer_s=0.05)
    assert upload(deps, {"type": "http.request", "body": b"--x\r\n", "more_body": True}) == 408


def test_an_upload_that_breaks_off_is_no_error_of_ours() -> None:
    deps = BatchDeps(authenticate, "", "", lambda: 1)
    begun: Message = {"type": "http.request", "body": b"--x\r\n", "more_body": True}
    assert upload(deps, begun, {"type": "http.disconnect"}) == 499


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
