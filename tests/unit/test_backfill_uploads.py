"""Uploads whose text is not what it is said to be: no way to break the gateway or to leave a file behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from fairlane.api_keys.roles import Role
from producers.backfill.batches import StoredFile
from producers.gateway.errors import GatewayError
from producers.gateway.identity.principal import Identity
from producers.gateway.openai import batch_deps
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.openai.batch_router import router
from producers.gateway.openai.errors import error_response
from producers.gateway.openai.files import stored_name

TENANT = "acme"


class Kept:
    """Files that were registered; like Postgres, none whose name is no text."""

    files: list[StoredFile]

    def __init__(self, _dsn: str, tenant: str) -> None:
        assert tenant == TENANT

    def add_file(self, file: StoredFile) -> None:
        file.filename.encode()
        assert "\x00" not in file.filename
        self.files.append(file)

    def close(self) -> None: ...


@pytest.fixture
def http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    async def authenticate(_request: Request) -> Identity:
        return Identity(TENANT, "key", Role.TENANT)

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return error_response(error)

    monkeypatch.setattr(Kept, "files", [], raising=False)
    monkeypatch.setattr(batch_deps, "BatchStore", Kept)
    app = FastAPI()
    app.add_exception_handler(GatewayError, refused)
    app.include_router(router(BatchDeps(authenticate, "", str(tmp_path), lambda: 1)))
    with TestClient(app, base_url="http://gateway", raise_server_exceptions=False) as client:
        yield client


def upload(http: TestClient, charset: str, filename: bytes = b"q.jsonl") -> tuple[int, dict[str, Any]]:
    body = (
        b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--edge\r\ncontent-disposition: form-data; name="file"; filename="' + filename + b'"\r\n\r\n{}\r\n--edge--\r\n'
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
