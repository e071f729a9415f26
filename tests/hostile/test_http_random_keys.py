"""Random API keys crowd out nobody's valid one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from benchmarks.processes import resident_bytes
from fairlane_server.api_keys.api_key import new_key
from tests.kit.gateway_kit import Served, serving
from tests.kit.http_kit import PeakMemory, bound_ms, honest, report
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone, pytest.mark.timeout(600)]

STRANGERS = 8
"""Connections that show one wrong key after the other."""
GRACE_S = 1
NOT_IN_GRACE = {"GATEWAY_KEY_GRACE_S": str(GRACE_S)}
MOST_GROWTH_BYTES = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    tenants = ("a", "b", "c")
    with serving(broker, postgres, folder, redis_url=redis_url, gateway_env=NOT_IN_GRACE, tenants=tenants) as served:
        yield served


@contextmanager
def strangers(served: Served) -> Iterator[dict[int, int]]:
    """How often each status was answered to them."""
    ended, statuses = threading.Event(), dict[int, int]()
    counting = threading.Lock()

    def show() -> None:
        with httpx.Client(base_url=served.url(), timeout=PATIENCE_S) as client:
            while not ended.is_set():
                answer = client.get("/v1/models", headers={"authorization": f"Bearer {new_key().text}"})
                with counting:
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    threads = [threading.Thread(target=show, daemon=True) for _ in range(STRANGERS)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def status_of(served: Served, tenant: str, address: str) -> int:
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=served.url(), transport=transport, timeout=PATIENCE_S) as client:
        return client.get("/v1/models", headers=served.headers(tenant)).status_code


def test_valid_keys_pass_while_strangers_flood(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    refused = "fairlane_authentications_refused_total"
    assert status_of(served, "a", "127.0.0.1") == 200
    with honest(served) as traffic:
        # Longer than GRACE_S: what is remembered of the key of `a` counts no more.
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        with PeakMemory(pid) as memory, strangers(served) as statuses:
            eventually(
                lambda: gateway.metric(refused, reason="too_many_failures") > 500, what="a flood that is refused"
            )
            looked_up = gateway.metric(refused, reason="wrong_key")
            beside_ms = traffic.p99_ms()
            for _ in range(20):
                assert status_of(served, "a", "127.0.0.1") == 200, "it was used before, from the same address"
                assert status_of(served, "c", "127.0.0.2") == 200, "it was never used before, from another"
            limited = gateway.metric(refused, reason="too_many_failures")
            looked_up = gateway.metric(refused, reason="wrong_key") - looked_up
    report(
        before=before_bytes, peak=memory.peak_bytes, after=resident_bytes(pid), quiet_ms=quiet_ms, beside_ms=beside_ms
    )
    assert set(statuses) <= {401, 429, 503}
    assert looked_up < limited / 2, "most were not looked up"
    assert memory.peak_bytes < before_bytes + MOST_GROWTH_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive
