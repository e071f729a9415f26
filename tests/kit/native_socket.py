"""A WebSocket of the native API, and the events it receives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.kit.native_kit import ID, KEY
from tests.kit.waiting import PATIENCE_S

Told = tuple[str, Any]


def client(url: str, key: str = KEY) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)


@contextmanager
def following(url: str, request_id: str = ID) -> Iterator[Iterator[Told]]:
    """The events of a request as they come; comments as ``(":", text)``."""
    with client(url) as http, http.stream("GET", f"/v1/requests/{request_id}/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events_in(response.iter_lines())


def events_in(lines: Iterator[str]) -> Iterator[Told]:
    """As a browser reads them."""
    name = ""
    for line in lines:
        if line.startswith(":"):
            yield ":", line
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def socket(url: str, request_id: str = ID, key: str | None = KEY) -> Iterator[ClientConnection]:
    """A WebSocket that follows a request."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    address = f"{url.replace('http', 'ws')}/v1/requests/{request_id}/events"
    with connect(address, additional_headers=headers, open_timeout=PATIENCE_S) as connection:
        yield connection


def said(connection: ClientConnection) -> Told:
    """The next event."""
    told = json.loads(connection.recv(PATIENCE_S))
    return told["event"], told["data"]
