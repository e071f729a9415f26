"""An NGINX as the edge of a test, and callers of it.

    with edge(folder, [f"127.0.0.1:{port}"]) as running, running.client() as client:
        client.get("/v1/models")

``SKIP_NGINX=1`` skips the tests marked with ``needs_nginx``; without it, a missing NGINX fails them.
"""

import json
import os
import select
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil
import pytest

from deploy.local.certificates import prepare_certificates
from deploy.local.nginx import HOST, Nginx, running
from deploy.local.ports import PortClaims
from deploy.local.supervisor import Instance
from tests.kit.waiting import PATIENCE_S

ANSWER = b"HTTP/1.1 "
_RECORD_BYTES = 16_384
"""Most of a record of TLS."""
needs_nginx = pytest.mark.skipif(os.environ.get("SKIP_NGINX") == "1", reason="SKIP_NGINX=1: the edge is not tested")


@dataclass(frozen=True, slots=True)
class Edge:
    """A running NGINX.

    Attributes:
        tls: trusts its certificate.
    """

    nginx: Nginx
    instance: Instance
    tls: ssl.SSLContext

    def client(self, headers: Mapping[str, str] | None = None, source: str = HOST) -> httpx.Client:
        """To be closed; calls from this address of the machine."""
        transport = httpx.HTTPTransport(verify=self.tls, local_address=source)
        return httpx.Client(base_url=self.nginx.url, headers=headers, timeout=PATIENCE_S, transport=transport)

    def connected(self, source: str = HOST, proxied: bytes = b"", receive_bytes: int = 0) -> ssl.SSLSocket:
        """A connection over TLS, to be closed.

        Args:
            source: address of this machine that it comes from.
            proxied: sent before TLS begins.
            receive_bytes: how much the system may hold of what was not read; 0: as much as it likes.
        """
        plain = socket.socket()
        plain.settimeout(PATIENCE_S)
        if receive_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.bind((source, 0))
        plain.connect((HOST, self.nginx.port))
        plain.sendall(proxied)
        return self.tls.wrap_socket(plain, server_hostname=HOST)

    def calls(self) -> list[dict[str, Any]]:
        """Its log."""
        return [json.loads(line) for line in self.nginx.access_log.read_text(encoding="utf-8").splitlines()]

    def resident_bytes(self) -> int:
        """Of its processes together; what they share counts once for each."""
        master = psutil.Process(self.instance.pid)
        return sum(each.memory_info().rss for each in (master, *master.children()))


@contextmanager
def edge(
    folder: Path,
    gateways: Sequence[str],
    *,
    site: Sequence[str] = (),
    listen: str = "",
    changes: Mapping[str, str] | None = None,
) -> Iterator[Edge]:
    """In front of these gateways, HOST:PORT, until the end of the block."""
    with closing(PortClaims()) as ports:
        certificates = prepare_certificates(folder / "certificates")
        nginx = Nginx(folder / "nginx", ports.take("edge"), gateways, certificates, site, listen, changes or {})
        with running(nginx) as instance:
            yield Edge(nginx, instance, ssl.create_default_context(cafile=str(certificates.ca_file)))


@contextmanager
def no_gateway() -> Iterator[str]:
    """An address at which nobody listens."""
    with closing(PortClaims()) as ports:
        yield f"{HOST}:{ports.take('nobody')}"


def received(peer: socket.socket, ends: bytes) -> bytes:
    """Everything up to these bytes; or up to the end of the connection, which must not be a reset."""
    came = b""
    while ends not in came and (piece := peer.recv(65_536)):
        came += piece
    return came


def status_of(answer: bytes) -> int:
    return int(answer[9:12])


def head(method: str, path: str, length: int = 0, more: str = "") -> bytes:
    """Of a call with a body of this length; ``more`` are lines of further headers."""
    return (f"{method} {path} HTTP/1.1\r\nhost: edge\r\ncontent-length: {length}\r\n{more}\r\n").encode("latin-1")


def sent_at_once(peer: socket.socket, calls: bytes) -> tuple[list[bytes], float]:
    """The answers to calls that are sent without waiting, and seconds until the last.

    By one thread: OpenSSL does not allow two to use one connection at once.
    """
    count, began = calls.count(b" HTTP/1.1\r\n"), monotonic()
    left = memoryview(calls)
    came, begun, looked_at = bytearray(), 0, 0
    patience_s = peer.gettimeout()
    peer.setblocking(False)
    try:
        while begun < count or not came.endswith(b"}"):
            sent = _sent(peer, left)
            left = left[sent:]
            piece = _piece(peer)
            assert piece != b"", "the connection was closed"
            if piece is None:
                if not sent:
                    ready = select.select([peer], [peer] if left else [], [], PATIENCE_S)
                    assert any(ready), "nothing came, and nothing could be sent"
                continue
            came += piece
            while (found := came.find(ANSWER, looked_at)) >= 0:
                begun, looked_at = begun + 1, found + 1
            looked_at = max(looked_at, len(came) - len(ANSWER))
    finally:
        peer.settimeout(patience_s)
    return bytes(came).split(ANSWER)[1:], monotonic() - began


def _sent(peer: socket.socket, left: memoryview) -> int:
    """How much of it the connection took."""
    try:
        # A TLS connection that could not take something must be offered the same again.
        return peer.send(left[:_RECORD_BYTES]) if left else 0
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return 0


def _piece(peer: socket.socket) -> bytes | None:
    """What has come; None for nothing yet, empty at the end of the connection."""
    try:
        return peer.recv(65_536)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None


def statuses_of(answers: list[bytes]) -> list[int]:
    return [int(answer[:3]) for answer in answers]


def said(peer: socket.socket) -> httpx.Response:
    """The error on a connection, which may be closed with it."""
    return parsed(received(peer, b"}}"))


def parsed(raw: bytes) -> httpx.Response:
    first, _, rest = raw.partition(b"\r\n")
    fields, _, body = rest.partition(b"\r\n\r\n")
    headers = [tuple(line.decode().split(": ", 1)) for line in fields.split(b"\r\n")]
    return httpx.Response(int(first.split()[1]), headers=headers, content=body)  # type: ignore[arg-type]  # pairs
