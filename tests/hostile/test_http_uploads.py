"""Uploads: large ones take no memory, slow ones of some tenants keep out no other."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import cycle

import httpx
import pytest

from benchmarks.processes import resident_bytes
from producers.gateway.openai.batch_deps import MOST_TRANSFERS, MOST_TRANSFERS_OF_TENANT
from tests.kit.gateway_kit import Served, serving
from tests.kit.http_kit import MEBIBYTE, PeakMemory, bound_ms, connected, honest, report
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone, pytest.mark.timeout(900)]

LARGE_BYTES = 512 * MEBIBYTE
MOST_GROWTH_BYTES = 64 * MEBIBYTE
"""Of two large uploads at once, in a container of 1 GiB."""
SLOW = "acdf"
TENANTS = (*SLOW, "b", "e")
UPLOAD_S = 300.0
_FORM = (
    b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--edge\r\ncontent-disposition: form-data; name="file"; filename="q.jsonl"\r\n\r\n'
)
_END = b"\r\n--edge--\r\n"


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("uploads")
    files = {"FILES_URL": str(folder / "files")}
    with serving(broker, postgres, folder, redis_url=redis_url, gateway_env=files, tenants=TENANTS) as served:
        yield served


def head(served: Served, tenant: str, file_bytes: int) -> bytes:
    key = served.headers(tenant)["authorization"]
    length = len(_FORM) + file_bytes + len(_END)
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: gateway\r\nauthorization: {key}\r\nconnection: close\r\n"
        f"content-type: multipart/form-data; boundary=edge\r\ncontent-length: {length}\r\n\r\n"
    ).encode() + _FORM


def upload(served: Served, tenant: str, file_bytes: int) -> bytes:
    """The whole answer."""
    block = b"x" * MEBIBYTE
    with connected(served) as peer:
        peer.settimeout(UPLOAD_S)
        peer.sendall(head(served, tenant, file_bytes))
        for _ in range(file_bytes // MEBIBYTE):
            peer.sendall(block)
        peer.sendall(_END)
        answer = b""
        while piece := peer.recv(65_536):
            answer += piece
        return answer


def test_two_large_uploads_at_once_take_no_memory(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    answers: list[bytes] = []
    with honest(served) as traffic:
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        with PeakMemory(pid) as memory:
            uploads = [
                threading.Thread(target=lambda: answers.append(upload(served, "a", LARGE_BYTES)), daemon=True)
                for _ in range(2)
            ]
            for thread in uploads:
                thread.start()
            beside_ms = traffic.p99_ms()
            for thread in uploads:
                thread.join(UPLOAD_S)
    report(
        before=before_bytes, peak=memory.peak_bytes, after=resident_bytes(pid), quiet_ms=quiet_ms, beside_ms=beside_ms
    )
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 2
    ids = {json.loads(answer.partition(b"\r\n\r\n")[2])["id"] for answer in answers}
    for file_id in ids:
        path = served.pipeline.folder / "files" / served.pipeline.tenant("a") / file_id
        assert path.stat().st_size == LARGE_BYTES
    assert memory.peak_bytes < before_bytes + MOST_GROWTH_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive
    with served.client("a") as client:
        for file_id in ids:
            assert client.delete(f"/v1/files/{file_id}").status_code == 200


def test_slow_uploads_of_four_tenants_leave_room_for_a_fifth(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    ended = threading.Event()
    with honest(served) as traffic, ExitStack() as opened:
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        peers = []
        for tenant, _ in zip(cycle(SLOW), range(len(SLOW) * MOST_TRANSFERS_OF_TENANT), strict=False):
            peer = opened.enter_context(connected(served))
            # As slow as a body may be: each waits for its end for most of an hour.
            peer.sendall(head(served, tenant, 4 * MEBIBYTE) + b"x" * 40_000)
            peers.append(peer)

        def drip() -> None:
            while not ended.wait(0.5):
                for peer in peers:
                    with suppress(OSError):
                        peer.sendall(b"x" * 1_024)

        slow = threading.Thread(target=drip, daemon=True)
        slow.start()
        try:
            eventually(lambda: refused(served, "a") == 429, what="a tenant that has all it may")
            beside_ms = traffic.p99_ms()
            for _ in range(5):
                assert upload(served, "e", MEBIBYTE).startswith(b"HTTP/1.1 200")
            # The others' small bodies come and go.
            eventually(lambda: gateway.metric("fairlane_gateway_body_bytes") == 0, what="no upload in memory")
        finally:
            ended.set()
            slow.join()
        peak_bytes = resident_bytes(pid)
    report(before=before_bytes, peak=peak_bytes, after=resident_bytes(pid), quiet_ms=quiet_ms, beside_ms=beside_ms)
    assert peak_bytes < before_bytes + MOST_GROWTH_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive
    assert len(SLOW) * MOST_TRANSFERS_OF_TENANT == MOST_TRANSFERS, "else this shows nothing"
    # Who went away gave back what was reserved.
    with served.client("a") as client:
        eventually(lambda: len(client.get("/v1/files").json()["data"]) == 0, what="no file of what never came")
        eventually(lambda: accepted(client), what="room for who held all of it")


def refused(served: Served, tenant: str) -> int:
    with served.client(tenant) as client:
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"})
        if answer.status_code == 200:
            client.delete(f"/v1/files/{answer.json()['id']}")
        return answer.status_code


def accepted(client: httpx.Client) -> bool:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}).status_code == 200
