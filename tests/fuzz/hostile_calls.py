"""Hostile calls to the gateway, by a tenant with a key: actions, as data that can be written down."""

import base64
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.fuzz import corpus
from tests.fuzz.mutation import mutated_bytes, mutated_json

Action = Mapping[str, Any]

KINDS = ("bodies", "lookups", "headers", "files", "sockets")
"""What ``--without`` may leave out."""
_WEIGHTS = (60, 10, 10, 5, 15)
_LOOKUPS = (
    *("/v1/requests/{}", "/v1/requests/{}/result", "/v1/requests/{}/events", "/v1/files/{}", "/v1/files/{}/content"),
    *(
        "/v1/batches/{}",
        "/v1/models/{}",
        "/v1/models",
        "/v1/requests?limit={}",
        "/v1/batches?after={}",
        "/v1/files?limit={}",
    ),
)
_ODD = (
    *(
        "",
        "%00",
        "%ff",
        "..%2f..",
        "9" * 5_000,
        "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11",
        "-1",
        "NaN",
        "%ed%a0%80",
        "a%0d%0ab",
    ),
    *("1e400", "%E2%80%AE", "'; DROP TABLE results; --", "x" * 2_000, "null", "file-00000000000000000000000000000000"),
)
_HEADERS = (
    *(
        "idempotency-key",
        "traceparent",
        "tracestate",
        "content-type",
        "content-encoding",
        "x-request-id",
        "last-event-id",
    ),
    *("authorization", "x-api-key", "expect", "accept", "range", "origin", "upgrade", "x-forwarded-for", "cookie"),
)
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n"
    b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n" + b'{"model": "words"}  '
)
_SENDER = b"POST /v1/requests HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n"
_UPGRADE = (
    b"GET /v1/live HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_SOCKETS = (
    _HEAD,
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n\r\n" * 3,
    _SENDER + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    _SENDER + b"Content-Length: 4194304\r\n\r\n{",
    _UPGRADE,
)


def action(rng: Random, model: str, without: frozenset[str]) -> Action:
    """One call; ``model`` is the name of one that is served."""
    kinds = [(kind, weight) for kind, weight in zip(KINDS, _WEIGHTS, strict=True) if kind not in without]
    (kind,) = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
    headers = {"content-type": "application/json"}
    path, valid = rng.choice(corpus.calls())
    seed = valid if rng.random() < 0.8 else rng.choice(corpus.bodies())
    body = seed if rng.random() < 0.05 else mutated_json(seed, rng, corpus.bodies())
    body = body.replace(b'"words"', f'"{model}"'.encode())
    match kind:
        case "lookups":
            method = rng.choice(("GET", "GET", "DELETE", "POST", "PUT"))
            return _call(kind, method, rng.choice(_LOOKUPS).format(rng.choice(_ODD)), headers, b"")
        case "headers":
            for _ in range(rng.randint(1, 5)):
                headers[rng.choice(_HEADERS)] = _printable(rng)
            return _call(kind, "POST", path, headers, body)
        case "files":
            boundary = rng.choice(("b", "", "x" * 300))
            head = f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'.encode()
            purpose = (
                f'\r\n--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}--\r\n'
            )
            form = mutated_bytes(head + body + purpose.encode(), rng, corpus.bodies())
            return _call(kind, "POST", "/v1/files", {"content-type": f"multipart/form-data; boundary={boundary}"}, form)
        case "sockets":
            data = rng.choice(_SOCKETS)
            given = data if rng.random() < 0.3 else mutated_bytes(data, rng, _SOCKETS)
            return {"door": "socket", "kind": kind, "data": base64.b64encode(given).decode()}
        case _:
            return _call(kind, "POST", path, headers, body)


def _call(kind: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Action:
    content = base64.b64encode(body).decode()
    return {"door": "http", "kind": kind, "method": method, "path": path, "headers": headers, "body": content}


def _printable(rng: Random) -> str:
    return rng.choice(
        ("", "gzip", "a" * 5_000, "*/*", "100-continue", "bytes=0-1,5-", "00-" + "0" * 32 + "-x-01", "é", "Bearer x")
    )
