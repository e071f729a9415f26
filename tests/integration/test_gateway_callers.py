"""Who may call a real gateway, for how long and how often; and that nothing of what callers send, or are answered, is
in any log or metric."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from uuid import uuid4

import httpx
import jwt
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from fairlane_server.api_keys.key_store import ApiKeys, IssuedKey
from tests.kit.gateway_kit import CALL_TIMEOUT_S, LONG_MS, Served, serving
from tests.kit.identity_kit import (
    AUDIENCE,
    ISSUER,
    claims,
    http_server,
    key_set,
    public_jwk,
    rsa_key,
    token,
    with_body,
)
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.broker

BURST = 100


@dataclass
class Issuer:
    """Publishes its key until it goes away."""

    stack: ExitStack = field(default_factory=ExitStack)
    url: str = ""

    def start(self) -> None:
        document = key_set(public_jwk(rsa_key(), kid="rsa-1"))

        def answer(handler: BaseHTTPRequestHandler) -> None:
            with_body(handler, document)

        self.url = self.stack.enter_context(http_server(answer))

    def go_away(self) -> None:
        self.stack.close()


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    issuer.start()
    yield issuer
    issuer.go_away()


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory, issuer: Issuer
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("callers")
    with serving(
        broker,
        postgres,
        folder,
        redis_url=redis_url,
        # Nobody logs more than at this level.
        env={"LOG_LEVEL": "DEBUG", "FILES_URL": str(folder / "files")},
        gateway_env={
            "JWT_ISSUER": ISSUER,
            "JWT_AUDIENCE": AUDIENCE,
            "JWT_JWKS_URL": issuer.url,
            # What is taken comes back after no test has the time for it.
            "GATEWAY_KEY_BURST": str(BURST),
            "GATEWAY_KEY_RATE_PER_S": "0.001",
        },
    ) as served:
        yield served


@pytest.fixture(scope="module")
def gateway(served: Served) -> ServiceProcess:
    return served.pipeline.processes["gateway-1"]


def caller(served: Served, shown: str) -> httpx.Client:
    """Who shows this."""
    return httpx.Client(base_url=served.url(), headers={"authorization": f"Bearer {shown}"}, timeout=CALL_TIMEOUT_S)


def new_key(served: Served) -> IssuedKey:
    with ApiKeys(served.database.owner_dsn) as keys:
        return keys.create(served.pipeline.tenant("a"), "of one test")


def payload(served: Served, **changed: Any) -> dict[str, Any]:
    return claims(tenant=served.pipeline.tenant("a"), sub=f"u-{uuid4().hex}", **changed)


def test_a_token_of_the_issuer_is_one_of_its_tenant(served: Served) -> None:
    said = payload(served)
    with caller(served, token(said)) as client:
        assert client.get("/v1/models").status_code == 200
        accepted = client.post("/v1/requests", json=served.question())
        assert accepted.status_code == 202, accepted.text
    line = served.call_line(accepted.json()["id"])
    assert (line["tenant"], line["subject"]) == (said["tenant"], said["sub"])


@pytest.mark.parametrize(
    "made",
    [
        lambda said: jwt.encode(said, "", "none", headers={"kid": "rsa-1"}),
        lambda said: token(said | {"aud": "another-service"}),
        lambda said: token(said | {"exp": said["exp"] - 86_400}),
        lambda said: token(said, rsa_key("second")),
    ],
    ids=["alg-none", "wrong-aud", "expired", "wrong-key"],
)
def test_a_token_that_is_none_of_the_issuers_is_refused(served: Served, made: Callable[[dict[str, Any]], str]) -> None:
    with caller(served, made(payload(served))) as client:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/requests"), ("DELETE", f"/v1/requests/{uuid4()}")):
            assert client.request(method, path).status_code == 401


def test_a_key_that_is_revoked_is_refused_soon(served: Served, gateway: ServiceProcess) -> None:
    issued = new_key(served)
    key_id = issued.key.key_id
    with caller(served, issued.text) as client:
        assert client.get("/v1/models").status_code == 200
        subprocess.run(
            (sys.executable, "-m", "fairlane_server.cli", "keys", "revoke", key_id),
            env=os.environ | {"POSTGRES_OWNER_DSN": served.database.owner_dsn},
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        eventually(lambda: client.get("/v1/models").status_code == 401, what="that the key is refused")
        assert client.get("/v1/models").status_code == 401
    refused = [entry["who"] for entry in gateway.events("authentication_refused") if entry["reason"] == "key_revoked"]
    assert refused
    assert set(refused) == {key_id}


def test_who_calls_too_often_is_told_when_to_come_again(served: Served) -> None:
    with caller(served, new_key(served).text) as client:
        # Twice at most: should Redis not answer in time, the gateway counts anew by itself.
        answers = [client.get("/v1/models")]
        while answers[-1].status_code == 200 and len(answers) <= 2 * BURST:
            answers.append(client.get("/v1/models"))
    first, last = answers[0], answers[-1]
    assert int(first.headers["x-ratelimit-remaining-requests"]) == BURST - 1
    assert (last.status_code, last.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert last.headers["x-ratelimit-limit-requests"] == str(BURST)
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    assert last.headers["x-ratelimit-reset-requests"].endswith("s")
    assert int(last.headers["retry-after"]) > 0
    assert int(last.headers["retry-after-ms"]) > 0
    line = served.call_line(last.headers["x-request-id"])
    assert (line["status"], line["outcome"], line["code"]) == (429, "refused", "rate_limit_exceeded")


def test_nothing_that_callers_send_or_are_answered_is_logged_or_counted(
    served: Served, gateway: ServiceProcess
) -> None:
    planted: dict[str, str] = {}

    def secret(place: str) -> str:
        planted[place] = f"secret{uuid4().hex}"
        return planted[place]

    def question(place: str, **fields: Any) -> dict[str, Any]:
        body = served.question(f"tell me of {secret(place)}")
        return body | {"timeout_ms": LONG_MS} | fields

    shown, said = new_key(served).text, token(payload(served))
    planted |= {"key": shown[20:], "token": said, "signature": said.rpartition(".")[2]}
    model = served.pipeline.model_for("embed")
    with caller(served, shown) as client:
        done = client.post(f"/v1/requests?wait=60&k={secret('query')}", json=question("prompt"))
        assert done.status_code == 200, done.text
        planted["answer"] = done.json()["output"]["text"]
        once = {"idempotency-key": secret("idempotency key")}
        for _ in range(2):
            assert client.post("/v1/requests?wait=60", json=served.question(), headers=once).status_code == 200
        other = client.post("/v1/requests", json=question("prompt of another body"), headers=once)
        assert other.status_code == 422
        chat = served.chat(secret("chat"), metadata={secret("metadata name"): secret("metadata")}, user=secret("user"))
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        events = client.post("/v1/chat/completions", json=served.chat(secret("streamed chat"), stream=True))
        assert events.text.endswith("data: [DONE]\n\n")
        assert client.post("/v1/embeddings", json={"model": model, "input": secret("text")}).status_code == 200
        ranked = {"model": model, "query": secret("query text"), "documents": [secret("document")]}
        assert client.post("/v1/rank", json=ranked).status_code == 200
        # What is wrong is said without what was given.
        wrong = [
            question("prompt of a bad body", **{secret("field"): 1}),
            question("prompt of an unknown model", model=secret("model")),
            question("prompt with a bad value", priority=secret("priority")),
            [secret("list")],
        ]
        for body in wrong:
            assert client.post("/v1/requests", json=body).status_code in (400, 404)
        for path in ("/v1/requests", "/v1/chat/completions"):
            assert client.post(path, content=f'{{"{secret(f"no json of {path}")}": ]').status_code == 400
        chat = served.chat(secret("chat of an unknown model"), model=secret("model of a chat"))
        assert client.post("/v1/chat/completions", json=chat).status_code == 404
        assert client.post(f"/v1/requests?wait={secret('wait')}", json=served.question()).status_code == 400
        assert client.get(f"/v1/requests/{secret('id')}").status_code == 404
        assert client.get(f"/v1/requests?cursor={secret('cursor')}").status_code == 400
        assert client.get(f"/{secret('path')}", headers={"x-other": secret("header")}).status_code == 404
        line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": secret("line")}}
        name = f"{secret('file name')}.jsonl"
        uploaded = client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, json.dumps(line))})
        assert (uploaded.status_code, uploaded.json()["filename"]) == (200, name)
        file_id = uploaded.json()["id"]
        assert planted["line"] in client.get(f"/v1/files/{file_id}/content").text
        batch = client.post(
            "/v1/batches",
            json={
                "input_file_id": file_id,
                "endpoint": "/v1/embeddings",
                "completion_window": "24h",
                "metadata": {"of": secret("batch metadata")},
            },
        )
        assert batch.status_code == 200, batch.text
        assert client.post(f"/v1/batches/{batch.json()['id']}/cancel").status_code == 200
    address = served.url(f"/v1/requests/{done.json()['id']}/events").replace("http", "ws", 1)
    address += f"?token={secret('query of a WebSocket')}"
    with connect(address, additional_headers={"authorization": f"Bearer {said}"}, open_timeout=PATIENCE_S) as listening:
        # All may be told before this is.
        with suppress(ConnectionClosed):
            listening.send(secret("message"))
        assert planted["answer"] in str(list(listening))
    with (
        pytest.raises(InvalidStatus),
        connect(address, additional_headers={"x-api-key": secret("wrong key")}, open_timeout=PATIENCE_S),
    ):
        pass
    with caller(served, secret("wrong bearer")) as stranger:
        refused = stranger.get("/v1/models")
        assert refused.status_code == 401
    assert served.call_line(refused.headers["x-request-id"])["status"] == 401

    def is_told() -> bool:
        lines = gateway.events("call")
        routes, objects = {line["route"] for line in lines}, {line.get("object_id") for line in lines}
        return (
            {"/v1/requests/{request_id}/events", "/v1/files", "none"} <= routes
            and {file_id, batch.json()["id"]} <= objects
            and any(line.get("is_repeat") for line in lines)
            and any("close_code" in line and line.get("code") == "invalid_api_key" for line in lines)
        )

    eventually(is_told, what="a line of every call")
    seen = {path.name: path.read_text(encoding="utf-8") for path in served.pipeline.folder.glob("*.log")}
    assert '"level": "debug"' in seen[gateway.log_file.name], "it tells all that it can"
    seen |= {f"metrics of {name}": process.get("/metrics")[1] for name, process in served.pipeline.processes.items()}
    found = {(place, where) for place, text in planted.items() for where, whole in seen.items() if text in whole}
    assert found == set()


# The last one: no issuer comes back.


def test_tokens_are_taken_while_the_issuer_is_away(served: Served, issuer: Issuer) -> None:
    with caller(served, token(payload(served))) as client:
        assert client.get("/v1/models").status_code == 200
    issuer.go_away()
    with pytest.raises(httpx.ConnectError):
        httpx.get(issuer.url)
    with caller(served, token(payload(served))) as client:
        assert client.get("/v1/models").status_code == 200
    with caller(served, token(payload(served, aud="another-service"))) as client:
        assert client.get("/v1/models").status_code == 401
