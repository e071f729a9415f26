"""Bodies that are held back from their end fill nobody's memory and delay nobody else."""

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.processes import resident_bytes
from tests.kit.gateway_kit import Served, serving
from tests.kit.http_kit import MEBIBYTE, PeakMemory, bound_ms, connected, honest, report, said
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone, pytest.mark.timeout(600)]

CONNECTIONS = 200
BODY_BYTES = 4 * MEBIBYTE
MOST_LEFT_BYTES = 32 * MEBIBYTE
BUDGET_BYTES, TENANT_BUDGET_BYTES = 256 * MEBIBYTE, 64 * MEBIBYTE


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(
        broker, postgres, tmp_path_factory.mktemp("held"), redis_url=redis_url, tenants=tuple("abcde")
    ) as served:
        yield served


def head(served: Served, tenant: str = "a", path: str = "/v1/requests", length: int = BODY_BYTES) -> bytes:
    key = served.headers(tenant)["authorization"]
    return (
        f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def hold_back(peer: socket.socket, call: bytes) -> None:
    """Send all of a body but its end."""
    peer.sendall(call + b'{"model": "' + b"x" * (BODY_BYTES - 4_096))


def test_held_bodies_of_a_tenant_stay_within_its_budget(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    with honest(served) as traffic, ExitStack() as opened:
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        with PeakMemory(pid) as memory:
            peers = []
            for _ in range(CONNECTIONS):
                peers.append(opened.enter_context(connected(served)))
                hold_back(peers[-1], head(served))
            beside_ms = traffic.p99_ms()
        held_bytes = gateway.metric("fairlane_gateway_body_bytes")
        assert TENANT_BUDGET_BYTES - BODY_BYTES < held_bytes <= TENANT_BUDGET_BYTES
        refused, _, _ = select.select(peers, [], [], 0)
        assert len(refused) >= CONNECTIONS - 2 * TENANT_BUDGET_BYTES // BODY_BYTES
        for peer in refused:
            # Not reset, though most of a body had not been read when it was refused.
            answer = said(peer)
            assert answer.startswith(b"HTTP/1.1 429 "), answer
            assert b'"too_many_body_bytes"' in answer
        opened.close()
        eventually(lambda: gateway.metric("fairlane_gateway_body_bytes") == 0, what="the end of all bodies")
        eventually(lambda: resident_bytes(pid) < before_bytes + MOST_LEFT_BYTES, what="the memory of before the peak")
        after_bytes = resident_bytes(pid)
    report(before=before_bytes, peak=memory.peak_bytes, after=after_bytes, quiet_ms=quiet_ms, beside_ms=beside_ms)
    # The bodies, the pieces that are being read, and the joining of some.
    assert memory.peak_bytes < before_bytes + 2 * TENANT_BUDGET_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive
    with served.client() as client:
        assert client.post("/v1/requests", json=served.question("x" * 500_000)).status_code == 202


def test_several_tenants_leave_room_in_the_budget_of_all(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    with honest(served) as traffic, ExitStack() as opened:
        before_bytes = resident_bytes(pid)
        with PeakMemory(pid) as memory:
            for tenant in ("a", "c", "d", "e"):
                for _ in range(2 * TENANT_BUDGET_BYTES // BODY_BYTES):
                    hold_back(opened.enter_context(connected(served)), head(served, tenant))
            held_bytes = gateway.metric("fairlane_gateway_body_bytes")
            traffic.p99_ms()
            with served.client("b") as client:
                assert client.post("/v1/requests", json=served.question("x" * 500_000)).status_code == 202
        assert 3 * TENANT_BUDGET_BYTES <= held_bytes < BUDGET_BYTES
        assert memory.peak_bytes < before_bytes + BUDGET_BYTES + TENANT_BUDGET_BYTES
        opened.close()
        eventually(lambda: resident_bytes(pid) < before_bytes + MOST_LEFT_BYTES, what="the memory of before the peak")
    assert gateway.pid == pid
    assert gateway.alive


def test_a_body_without_an_identity_is_not_read(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    before_bytes = resident_bytes(gateway.pid)
    stranger = head(served).replace(served.keys["a"].encode(), b"fl_0123456789abcdef_" + b"x" * 43)
    with PeakMemory(gateway.pid) as memory, ExitStack() as opened:
        for _ in range(50):
            peer = opened.enter_context(connected(served))
            hold_back(peer, stranger)
            assert peer.recv(65_536).startswith(b"HTTP/1.1 4")
        assert gateway.metric("fairlane_gateway_body_bytes") == 0
    assert memory.peak_bytes < before_bytes + MOST_LEFT_BYTES
