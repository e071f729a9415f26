"""Life of a process: readiness, the health port, signals."""

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from time import monotonic

import pytest

from fairlane_server.processes import service
from fairlane_server.processes.service import MOST_SCRAPES, HealthServer, Readiness, StopSignal
from tests.kit.waiting import eventually

HOST = "127.0.0.1"


@pytest.fixture
def readiness() -> Readiness:
    return Readiness("engines", "assignment")


@pytest.fixture
def server(readiness: Readiness) -> Iterator[HealthServer]:
    server = HealthServer(readiness, HOST, 0)
    server.start()
    yield server
    server.stop()


def get(server: HealthServer, path: str) -> tuple[int, str, bytes]:
    assert server.port is not None
    connection = http.client.HTTPConnection(HOST, server.port, timeout=5)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()


def test_ready_means_that_every_condition_holds(readiness: Readiness) -> None:
    assert not readiness.ready
    assert readiness.reasons() == {"engines": "not yet", "assignment": "not yet"}
    readiness.set("engines")
    readiness.set("assignment", "waiting for the group")
    assert readiness.reasons() == {"engines": None, "assignment": "waiting for the group"}
    for reason in ("waiting for the group", None, "draining"):
        readiness.set("assignment", reason)
        assert readiness.ready == (reason is None)


def test_health_is_alive_before_it_is_ready(server: HealthServer, readiness: Readiness) -> None:
    assert get(server, "/health") == (200, "application/json", b'{"status": "alive"}\n')
    readiness.set("engines")
    status, _, body = get(server, "/health/ready")
    assert (status, json.loads(body)) == (
        503,
        {"status": "not_ready", "conditions": {"engines": None, "assignment": "not yet"}, "degraded": {}},
    )
    readiness.set("assignment")
    status, _, body = get(server, "/health/ready")
    assert (status, json.loads(body)["status"]) == (200, "ready")


def test_a_part_that_it_works_without_is_named_and_leaves_it_ready(server: HealthServer, readiness: Readiness) -> None:
    readiness.set("engines")
    readiness.set("assignment")
    readiness.degrade("embedder", "it cannot be loaded")
    status, _, body = get(server, "/health/ready")
    assert (status, json.loads(body)["degraded"]) == (200, {"embedder": "it cannot be loaded"})
    readiness.degrade("embedder", None)
    assert json.loads(get(server, "/health/ready")[2])["degraded"] == {}


def test_metrics_are_prometheus_text(server: HealthServer, readiness: Readiness) -> None:
    readiness.set("engines")
    readiness.set("assignment")
    status, content_type, body = get(server, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert b"fairlane_ready 1.0" in body
    assert get(server, "/anything")[0] == 404


def test_other_methods_are_refused(server: HealthServer) -> None:
    assert server.port is not None
    connection = http.client.HTTPConnection(HOST, server.port, timeout=5)
    with closing(connection):
        connection.request("POST", "/health", b"x")
        assert connection.getresponse().status == 501


def test_silent_scrapers_hold_up_nobody(server: HealthServer) -> None:
    assert server.port is not None
    silent = [socket.create_connection((HOST, server.port), timeout=5) for _ in range(10)]
    started = monotonic()
    assert get(server, "/health")[0] == 200
    assert monotonic() - started < 2
    server.stop()
    assert monotonic() - started < 4
    for scraper in silent:
        scraper.close()


def test_many_connections_have_few_threads_and_the_newest_is_answered(server: HealthServer) -> None:
    assert server.port is not None
    before = threading.active_count()
    silent = []
    for _ in range(5 * MOST_SCRAPES):
        silent.append(socket.create_connection((HOST, server.port), timeout=5))
        # Accepted by now, for it is behind the others.
        assert get(server, "/health")[0] == 200
    eventually(lambda: threading.active_count() <= before + MOST_SCRAPES, what="few threads")
    assert silent[0].recv(1) == b"", "the oldest was ended"
    for scraper in silent:
        scraper.close()


def test_a_scraper_that_dawdles_is_ended(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LONGEST_SCRAPE_S", 0.2)
    assert server.port is not None
    with socket.create_connection((HOST, server.port), timeout=30) as slow:
        slow.sendall(b"GET /metr")
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    "call", [b"GET /health HTTP/1.1\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n", b"x" * 70_000 + b"\r\n\r\n"]
)
def test_no_answer_says_what_answers(server: HealthServer, call: bytes) -> None:
    assert server.port is not None
    with socket.create_connection((HOST, server.port), timeout=30) as peer:
        peer.sendall(call)
        said = b""
        with suppress(ConnectionError):
            while piece := peer.recv(65_536):
                said += piece
    fields = [line.partition(b":")[0].lower() for line in said.partition(b"\r\n\r\n")[0].splitlines()[1:]]
    assert b"server" not in fields
    assert b"x-content-type-options" in fields


def test_a_taken_port_is_no_reason_to_stop(readiness: Readiness) -> None:
    with socket.create_server((HOST, 0)) as taken:
        server = HealthServer(readiness, HOST, taken.getsockname()[1])
        server.start()
        assert server.port is None
        server.stop()


def test_a_successor_may_take_the_port_at_once(readiness: Readiness) -> None:
    first = HealthServer(readiness, HOST, 0)
    first.start()
    assert get(first, "/health")[0] == 200
    port = first.port
    assert port is not None
    first.stop()
    second = HealthServer(readiness, HOST, port)
    second.start()
    assert second.port == port
    second.stop()


def test_no_thread_of_the_server_keeps_the_process(server: HealthServer) -> None:
    get(server, "/health")
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_once_and_the_next_one_ends(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = StopSignal()
        stop.install()
        assert not stop.stopping
        assert not stop.wait(0)
        signal.raise_signal(number)
        eventually(lambda: stop.stopping, 1)
        assert stop.wait(0)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
