"""The edge in front of two real gateways: streams, WebSockets, restarts and kills under load, and idle callers."""

import json
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from websockets.sync.client import connect

from benchmarks.processes import resident_bytes
from deploy.local.services import HOST
from fairlane.names import requests_topic
from fairlane_server.api_keys.api_key import new_key
from producers.openai_api.errors import REQUEST_ID_HEADER
from tests.kit.gateway_kit import Served, serving
from tests.kit.http_kit import MEBIBYTE
from tests.kit.nginx_kit import Edge, edge, needs_nginx, received, status_of
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone, pytest.mark.timeout(600), needs_nginx]

CALLERS = 8
CALLS = 400
IN_FLIGHT = 20
IDLE = 1_000
MOST_BYTES_EACH = 64 * 1024
"""Of the edge for an idle connection, with its TLS."""
TRUSTED = {
    "GATEWAY_TRUSTED_PROXIES": "127.0.0.1/32",
    "GATEWAY_MAX_CONNECTIONS_PER_ADDRESS": "20000",
    # Three at once.
    "GATEWAY_FAILED_KEYS_PER_S": "0.3",
}


@dataclass(frozen=True)
class Site:
    """A pipeline with two gateways behind an edge."""

    served: Served
    edge: Edge

    def client(self, source: str = HOST) -> httpx.Client:
        return self.edge.client(self.served.headers(), source)

    def start(self, number: int) -> None:
        """A gateway, if it does not run."""
        process = self.served.pipeline.processes.get(f"gateway-{number}")
        if process is None or not process.alive:
            self.served.gateway(number, TRUSTED).wait_ready()


@pytest.fixture(scope="module")
def running(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("edge")
    with serving(broker, postgres, folder, redis_url=redis_url, gateway_env=TRUSTED) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        served.gateway(2, TRUSTED).wait_ready()
        with edge(folder, [f"{HOST}:{served.ports[f'gateway-{number}']}" for number in (1, 2)]) as running:
            yield Site(served, running)


@pytest.fixture
def site(running: Site) -> Site:
    for number in (1, 2):
        running.start(number)
    return running


@dataclass
class Load:
    """Callers that ask one question after the other until they are told to stop.

    Attributes:
        answers: every one, as it came.
    """

    site: Site
    answers: list[httpx.Response] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        with self.site.client() as client:
            while not self._stopping.is_set():
                self.answers.append(client.post("/v1/chat/completions", json=self.site.served.chat()))

    def stop(self) -> None:
        self._stopping.set()

    def wait_more(self, count: int) -> None:
        wanted = len(self.answers) + count
        eventually(lambda: len(self.answers) >= wanted, 5 * PATIENCE_S, f"{count} answers")


@contextmanager
def load(site: Site) -> Iterator[Load]:
    callers = Load(site)
    with ThreadPoolExecutor(CALLERS) as pool:
        asking = [pool.submit(callers.ask) for _ in range(CALLERS)]
        try:
            yield callers
        finally:
            callers.stop()
        for each in asking:
            each.result(2 * PATIENCE_S)


def calls_at(site: Site, number: int) -> float:
    """That a gateway has answered since its start."""
    gateway = site.served.pipeline.processes[f"gateway-{number}"]
    return gateway.metric("fairlane_gateway_calls_total", route="/v1/chat/completions")


def test_both_gateways_answer(site: Site) -> None:
    before = [calls_at(site, number) for number in (1, 2)]
    with site.client() as client:
        answers = [client.post("/v1/chat/completions", json=site.served.chat()) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers[REQUEST_ID_HEADER] for answer in answers}) == 10
    assert [calls_at(site, number) - had for number, had in zip((1, 2), before, strict=True)] == [5, 5]


def test_an_event_arrives_while_its_request_goes_on(site: Site) -> None:
    """As server-sent events, and over a WebSocket."""
    with site.client() as client, site.served.engines_paused():
        links = client.post("/v1/requests", json=site.served.question()).json()["links"]
        url = site.edge.nginx.url.replace("https", "wss") + links["events"]
        headers = site.served.headers()
        with (
            client.stream("GET", links["events"]) as following,
            connect(url, ssl=site.edge.tls, additional_headers=headers, open_timeout=PATIENCE_S) as websocket,
        ):
            lines = following.iter_lines()
            assert next(lines) == "event: status"
            assert json.loads(websocket.recv(PATIENCE_S))["event"] == "status"
            site.served.resume()
            assert [line for line in lines if line.startswith("event: ")][-1] == "event: result"
            while json.loads(websocket.recv(PATIENCE_S))["event"] != "result":
                pass


def test_a_chat_is_streamed(site: Site) -> None:
    with (
        site.client() as client,
        client.stream("POST", "/v1/chat/completions", json=site.served.chat(stream=True)) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2


def test_no_call_fails_while_a_gateway_is_replaced(site: Site) -> None:
    second = site.served.pipeline.processes["gateway-2"]
    with load(site) as callers:
        callers.wait_more(CALLS // 4)
        for _ in range(2):
            second.send(signal.SIGTERM)
            assert second.wait_ended() == 0
            callers.wait_more(CALLS // 8)
            site.start(2)
            second = site.served.pipeline.processes["gateway-2"]
            # Until the edge sends it calls again.
            eventually(lambda: calls_at(site, 2) > CALLS // 8, 2 * PATIENCE_S, "calls at the new gateway")
    assert Counter(answer.status_code for answer in callers.answers) == {200: len(callers.answers)}
    assert len(callers.answers) >= CALLS
    sys.stdout.write(f"\n{len(callers.answers)} calls over two restarts\n")


def test_only_calls_at_a_killed_gateway_fail(site: Site) -> None:
    served = site.served
    reader = served.pipeline.reader(requests_topic(served.pipeline.tenant("a")), from_beginning=False)

    def call(number: int) -> httpx.Response:
        with site.client() as client:
            return client.post("/v1/chat/completions", json=served.chat(f"call {number}"))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        with served.engines_paused():
            calls = [pool.submit(call, number) for number in range(IN_FLIGHT)]
            reader.wait(lambda: len(reader.records) >= IN_FLIGHT, what="the requests")
            at_second = int(served.pipeline.processes["gateway-2"].metric("fairlane_gateway_waiting_calls"))
            assert 0 < at_second < IN_FLIGHT
            served.pipeline.processes["gateway-2"].kill()
            # At once, while the others wait.
            eventually(lambda: sum(each.done() for each in calls) == at_second, what="the end of the calls there")
            failed = [each.result() for each in calls if each.done()]
        answers = [each.result(2 * PATIENCE_S) for each in calls]
    assert {answer.status_code for answer in failed} == {503}
    assert {answer.json()["error"]["code"] for answer in failed} == {"uncertain"}
    assert {answer.headers["x-should-retry"] for answer in failed} == {"false"}
    assert Counter(answer.status_code for answer in answers) == {200: IN_FLIGHT - at_second, 503: at_second}
    with site.client() as client:
        for _ in range(20):
            assert client.post("/v1/chat/completions", json=served.chat()).status_code == 200


def test_wrong_keys_count_for_the_address_that_they_came_from(site: Site) -> None:
    """Whatever it says of itself; and for no other behind the same edge."""

    def ask(source: str, number: int) -> int:
        wrong = {"authorization": f"Bearer {new_key().text}", "x-forwarded-for": f"203.0.113.{number}"}
        with site.edge.client(wrong, source) as client:
            return client.get("/v1/models").status_code

    # Each of the two gateways takes three, and NGINX's processes each have a turn of their own.
    answers = [ask("127.0.0.21", number) for number in range(20)]
    assert set(answers) == {401, 429}
    assert answers[-2:] == [429, 429]
    # One more every three seconds at each. A gateway that an earlier test ended may be left out for now.
    assert 3 <= answers.count(401) <= 8
    assert ask("127.0.0.22", 0) == 401


def test_idle_callers_take_little_memory_and_no_gateway(site: Site) -> None:
    gateways = [site.served.pipeline.processes[f"gateway-{number}"] for number in (1, 2)]
    raise_descriptors(IDLE + 512)
    connections_before = [each.metric("fairlane_gateway_connections") for each in gateways]
    with site.client() as client, ExitStack() as opened:
        assert client.get("/v1/models").status_code == 200
        before = [site.edge.resident_bytes(), *(resident_bytes(each.pid) for each in gateways)]
        for _ in range(IDLE):
            peer = opened.enter_context(site.edge.connected())
            # One that never called is closed after 10 s.
            peer.sendall(b"GET /nothing HTTP/1.1\r\nhost: edge\r\n\r\n")
            assert status_of(received(peer, b"}}")) == 404
        after = [site.edge.resident_bytes(), *(resident_bytes(each.pid) for each in gateways)]
        assert client.get("/v1/models").status_code == 200
        grown = [(late - early) / MEBIBYTE for early, late in zip(before, after, strict=True)]
        connections = [each.metric("fairlane_gateway_connections") for each in gateways]
        assert all(late <= early + 1 for late, early in zip(connections, connections_before, strict=True))
    sys.stdout.write(
        f"\n{IDLE} idle connections: edge {grown[0]:+.1f} MiB, gateways {grown[1]:+.1f}, {grown[2]:+.1f}\n"
    )
    assert grown[0] * MEBIBYTE < IDLE * MOST_BYTES_EACH


def raise_descriptors(wanted: int) -> None:
    """Of this process. Raises ValueError if the machine does not permit so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
