"""Several worker processes behind one port of the gateway."""

import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.kit.gateway_kit import CALL_TIMEOUT_S, Served, serving
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

WORKERS = 2


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("gateway"), redis_url=redis_url) as served:
        yield served


@pytest.fixture
def gateway(served: Served) -> Iterator[ServiceProcess]:
    gateway = served.gateway(3, {"GATEWAY_WORKERS": str(WORKERS)})
    eventually(lambda: is_open(served), what="the port of the workers")
    workers = workers_of(gateway)
    yield gateway
    if gateway.alive:
        gateway.stop()
    # A worker that still drains would be taken for one of the next gateway.
    eventually(lambda: not any(worker.is_running() for worker in workers), what="the end of the workers")


def is_open(served: Served) -> bool:
    try:
        return httpx.get(served.url("/health/ready", 3), timeout=CALL_TIMEOUT_S).status_code == 200
    except httpx.TransportError:
        return False


def workers_of(gateway: ServiceProcess) -> list[psutil.Process]:
    return psutil.Process(gateway.pid).children()


def ask(served: Served) -> httpx.Response:
    """Over a connection of its own."""
    body, headers = served.chat(), served.headers()
    return httpx.post(served.url("/v1/chat/completions", 3), json=body, headers=headers, timeout=CALL_TIMEOUT_S)


def test_calls_are_answered_whichever_worker_dies_and_dead_ones_are_replaced(
    served: Served, gateway: ServiceProcess
) -> None:
    first = workers_of(gateway)
    assert len(first) == WORKERS
    for killed in first:
        others = [worker for worker in workers_of(gateway) if worker.pid != killed.pid]
        killed.kill()
        # Its connections are lost, and no new one: another worker accepts them, or the next one when it has started.
        assert [ask(served).status_code for _ in range(3)] == [200] * 3

        def is_replaced(others: list[psutil.Process] = others) -> bool:
            return len([worker for worker in workers_of(gateway) if worker not in others]) == 1

        eventually(is_replaced, what="another worker")
        replaced = gateway.events("worker_died")[-1]
        assert replaced["status"] == -signal.SIGKILL
    assert not {worker.pid for worker in first} & {worker.pid for worker in workers_of(gateway)}


def test_a_stop_signal_drains_all_workers(served: Served, gateway: ServiceProcess) -> None:
    workers = workers_of(gateway)
    gateway.send(signal.SIGTERM)
    assert gateway.wait_ended() == 0
    assert not any(worker.is_running() for worker in workers)
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url("/health", 3))


def test_workers_end_with_their_parent(gateway: ServiceProcess) -> None:
    workers = workers_of(gateway)
    gateway.kill()
    eventually(lambda: not any(worker.is_running() for worker in workers), what="the end of the workers")


def test_a_port_in_use_ends_the_start(served: Served, gateway: ServiceProcess) -> None:
    other = served.gateway(4, {"GATEWAY_WORKERS": "2", "GATEWAY_PORT": str(served.ports["gateway-3"])})
    assert gateway.alive
    assert other.wait_ended() == 1
    assert "in use" in other.events("gateway_failed")[-1]["reason"]
