"""What open streams hold in the memory of a gateway: of 500 of each kind, and what that makes of 10,000."""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
import pytest

from fairlane.names import chunks_topic
from fairlane.records import ReplyChunk
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(900)]

WAIT_S = 3 * PATIENCE_S
STREAMS = 500
WARM_UP = 20
"""What every process needs once is there after these."""
MOST_KIB = 120
"""Twice of what either kind was seen to take."""
PIECES = 20
PIECE = "A piece of an answer that is made while somebody reads it, as long as some twenty tokens may well be. "
TENANTS = ("a", "b")
"""Of what waits at a gateway, one may have half."""


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    # The engines are paused, and what waits for them is to be taken all the same.
    patient = {"LATENCY_TARGET_MS": "normal=86400000"}
    with serving(broker, postgres, tmp_path_factory.mktemp("memory"), redis_url=redis_url, env=patient) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        yield served


class Line:
    """A connection with one call that streams, and what came on it."""

    def __init__(self, address: httpx.URL, call: bytes) -> None:
        self._address = (address.host, address.port)
        self._call = call
        self._socket: socket.socket | None = None
        self.came = b""
        self._send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._socket is not None
        self._socket.close()

    def wait_open(self) -> None:
        """A machine that is busy may say that it is to be sent again."""
        eventually(self._is_open, WAIT_S, "an open stream")

    @property
    def request_id(self) -> str:
        """Of the request that is answered, once it is open: of what was sent again, that of the last time."""
        fields = (line.partition(b": ") for line in self.came.partition(b"\r\n\r\n")[0].splitlines())
        return next(value.decode() for name, _, value in fields if name.lower() == b"x-request-id")

    def wait_for(self, part: str, times: int = 1) -> None:
        """Until this came so often."""
        assert self._socket is not None
        while self.came.count(part.encode()) < times:
            data = self._socket.recv(65_536)
            assert data, f"the gateway closed the connection after {self.came[-500:]!r}"
            self.came += data

    def _is_open(self) -> bool:
        self.wait_for("\r\n\r\n")
        if b" 200 " in self.came.split(b"\r\n")[0]:
            return True
        assert self.came.split()[1] in (b"429", b"503"), self.came
        assert self._socket is not None
        self._socket.close()
        self._send()
        return False

    def _send(self) -> None:
        self.came = b""
        self._socket = socket.create_connection(self._address, WAIT_S)
        self._socket.sendall(self._call)


def call(served: Served, tenant: str, method: str, path: str, body: bytes = b"") -> bytes:
    headers = {"host": "gateway", **served.headers(tenant)}
    if body:
        headers |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def all_open(stack: ExitStack, address: str, calls: Sequence[bytes]) -> list[Line]:
    lines = [stack.enter_context(Line(httpx.URL(address), one)) for one in calls]
    for line in lines:
        line.wait_open()
    return lines


def test_who_watches_a_request_takes_little_memory(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    with served.engines_paused(), served.client() as client, ExitStack() as stack:
        answer = client.post("/v1/requests", json={**served.question(), "timeout_ms": LONG_MS})
        assert answer.status_code == 202, answer.text
        watch = call(served, "a", "GET", answer.json()["links"]["events"])

        def watchers(number: int) -> None:
            for line in all_open(stack, served.url(), [watch] * number):
                line.wait_for("event: status")

        watchers(WARM_UP)
        before = resident_kib(gateway)
        watchers(STREAMS)
        told("who watches", resident_kib(gateway) - before)


def test_a_chat_that_is_streamed_takes_little_memory(served: Served) -> None:
    # One that has no memory to use again.
    gateway = served.gateway(2).wait_ready()
    body = json.dumps(served.chat(stream=True, max_tokens=512)).encode()
    calls = [call(served, tenant, "POST", "/v1/chat/completions", body) for tenant in TENANTS]
    with served.engines_paused(), ExitStack() as stack:

        def chats(number: int) -> list[Line]:
            return all_open(stack, served.url(number=2), calls * (number // len(calls)))

        give_text(served, chats(WARM_UP))
        before = resident_kib(gateway)
        lines = chats(STREAMS)
        told("a chat without text", resident_kib(gateway) - before)
        give_text(served, lines)
        told(f"a chat of {PIECES * len(PIECE)} characters", resident_kib(gateway) - before)


def give_text(served: Served, lines: Sequence[Line]) -> None:
    """Text on these lines, whose tenants take turns, as an engine would give it. Returns when it came."""
    for number, tenant in enumerate(map(served.pipeline.tenant, TENANTS)):
        pieces = [
            ReplyChunk(line.request_id, tenant, generation=0, attempt=1, seq=seq, text=PIECE)
            for seq in range(PIECES)
            for line in lines[number :: len(TENANTS)]
        ]
        encode = served.pipeline.codec.encode
        served.pipeline.write(chunks_topic(tenant), [(one.request_id.encode(), encode(one)) for one in pieces])
    for line in lines:
        line.wait_for(PIECE, PIECES)


def told(what: str, kib: int) -> None:
    """Say what was measured of all of them, and hold it against the bound of one."""
    each = kib / STREAMS
    print(f"{what}: {each:.1f} KiB, {each * 10_000 / 1_024:.0f} MiB for 10,000 of them")  # noqa: T201 - the estimate
    assert each < MOST_KIB


def resident_kib(process: ServiceProcess) -> int:
    """What a process holds in memory."""
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("the process says nothing of its memory")
