"""The rules of the edge, each by itself, in front of gateways that say what they got."""

import json
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from websockets.sync.client import connect

from deploy.local import nginx as local_nginx
from deploy.local.layout import PROJECT_ROOT
from deploy.local.nginx import NginxMissingError
from fairlane.outcomes import Code
from producers.gateway.edge.connections import ConnectionTimeouts
from producers.gateway.edge.error_responses import error_response
from producers.gateway.limits.rate_limits import RATE_LIMITED
from producers.openai_api.errors import UNAVAILABLE, UNCERTAIN, GatewayError
from tests.kit.nginx_kit import (
    ANSWER,
    Edge,
    edge,
    head,
    needs_nginx,
    no_gateway,
    parsed,
    received,
    said,
    sent_at_once,
    status_of,
    statuses_of,
)
from tests.kit.stub_gateways import (
    LARGE,
    PIECES,
    REQUEST_ID,
    STREAM,
    BreakingGateway,
    StubGateway,
    breaking_gateway,
    silent_gateway,
    stub_gateway,
)
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, needs_nginx]

BURST, RATE_PER_S = 1_000, 1_000
BODY_BYTES = 4_194_304
NATIVE, OPENAI = "/v1/requests", "/v1/embeddings"
SECRET = "fl_0123456789abcdef_secret"


@dataclass
class Site:
    """An edge and two gateways."""

    edge: Edge
    first: StubGateway
    second: StubGateway

    def forget(self) -> None:
        for gateway in (self.first, self.second):
            gateway.calls.clear()
            gateway.begun = 0
            gateway.refusal = None

    def calls(self) -> list[str]:
        """Paths of all calls that were complete."""
        return [call.path for gateway in (self.first, self.second) for call in gateway.calls]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with stub_gateway("first") as first, stub_gateway("second") as second:
        folder = tmp_path_factory.mktemp("edge")
        with edge(folder, [first.address, second.address]) as running:
            yield Site(running, first, second)


@pytest.fixture
def site(running: Site) -> Site:
    running.forget()
    return running


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with site.edge.client() as client:
        yield client


def test_a_missing_nginx_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_nginx, "PROGRAM", PROJECT_ROOT / "nowhere")
    with (
        pytest.raises(NginxMissingError, match="nowhere is missing: run `make nginx`, or set SKIP_NGINX=1"),
        edge(tmp_path, []),
    ):
        raise AssertionError("it runs")


# ------------------------------------------------------------------ gateways


def test_calls_go_to_the_gateways_in_turn_over_connections_that_are_kept(site: Site, client: httpx.Client) -> None:
    names = Counter(client.get("/v1/models").json()["gateway"] for _ in range(100))
    assert names == {"first": 50, "second": 50}
    for gateway in (site.first, site.second):
        # The calls came one after the other over one connection, which one worker of the edge has.
        assert len({call.peer for call in gateway.calls}) == 1


def test_a_gateway_that_is_down_is_passed_over(tmp_path: Path) -> None:
    with no_gateway() as down, stub_gateway("up") as gateway, edge(tmp_path, [down, gateway.address]) as running:
        with running.client() as client:
            answers = [client.post(NATIVE, content=b"x" * 100_000) for _ in range(50)]
        assert [answer.status_code for answer in answers] == [200] * 50
        assert [call.body_bytes for call in gateway.calls] == [100_000] * 50
        tries = Counter(call["gateway_status"] for call in running.calls())
    # After 5 failures it is left out.
    assert tries["502, 200"] == 5


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[tuple[Edge, BreakingGateway, StubGateway]]:
    """An edge in front of a gateway that breaks every call, and one that works."""
    with (
        breaking_gateway() as breaking,
        stub_gateway("works") as works,
        edge(tmp_path, [breaking.address, works.address]) as running,
    ):
        yield running, breaking, works


def test_a_post_is_never_sent_twice(broken: tuple[Edge, BreakingGateway, StubGateway]) -> None:
    running, breaking, works = broken
    with running.client() as client:
        answers = [client.post(f"{NATIVE}?number={number}", content=b"{}") for number in range(20)]
    statuses = Counter(answer.status_code for answer in answers)
    # It breaks five, in turn with those that are answered, and then is left out.
    assert statuses == {503: 5, 200: 15}
    assert len(breaking.calls) == 5
    assert len(works.calls) == 15
    for answer in answers:
        if answer.status_code == 503:
            assert_says(answer, NATIVE, UNCERTAIN_AT_EDGE)


def test_what_repeats_no_work_is_sent_to_another(broken: tuple[Edge, BreakingGateway, StubGateway]) -> None:
    running, breaking, works = broken
    with running.client() as client:
        for method in ("GET", "DELETE"):
            for _ in range(4):
                assert client.request(method, f"{NATIVE}/{REQUEST_ID}").json()["gateway"] == "works"
    assert breaking.calls
    assert len(works.calls) == 8


def test_a_gateway_that_does_not_answer_ends_the_wait(tmp_path: Path) -> None:
    changes = {"proxy_read_timeout 120s;": "proxy_read_timeout 1s;"}
    with silent_gateway() as silent, stub_gateway("works") as works:
        with edge(tmp_path, [silent, works.address], changes=changes) as running, running.client() as client:
            assert [client.get("/v1/models").json()["gateway"] for _ in range(2)] == ["works"] * 2
            answers = [client.post(OPENAI, content=b"{}") for _ in range(2)]
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        (late,) = (answer for answer in answers if answer.status_code == 503)
        assert_says(late, OPENAI, UNCERTAIN_AT_EDGE)
        assert len([call for call in works.calls if call.method == "POST"]) == 1


@pytest.mark.parametrize("path", [NATIVE, OPENAI])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_any_gateway_nothing_is_accepted(tmp_path: Path, path: str, method: str) -> None:
    with (
        no_gateway() as one,
        no_gateway() as other,
        edge(tmp_path, [one, other]) as running,
        running.client() as client,
    ):
        for _ in range(20):
            assert_says(client.request(method, path, content=b"{}"), path, UNAVAILABLE_AT_EDGE)


def test_nobody_can_leave_gateways_out_for_others(site: Site, client: httpx.Client) -> None:
    """Calls that a gateway cuts or refuses while their bodies are on the way."""
    with ExitStack() as opened:
        for _ in range(20):
            many = "".join(f"a{number}: b\r\n" for number in range(101))
            peer = opened.enter_context(site.edge.connected())
            peer.sendall(head("POST", NATIVE, BODY_BYTES, many))
            peer.sendall(b"x" * BODY_BYTES)
            assert status_of(received(peer, b"\r\n\r\n")) == 431
        for _ in range(20):
            # Not a byte that HTTP has in a value.
            peer = opened.enter_context(site.edge.connected())
            peer.sendall(head("POST", NATIVE, BODY_BYTES, "a: \x01\r\n"))
            peer.sendall(b"x" * BODY_BYTES)
            assert status_of(received(peer, b"\r\n\r\n")) == 400
    names = Counter(client.get("/v1/models").json()["gateway"] for _ in range(20))
    assert names == {"first": 10, "second": 10}
    assert all(call["gateway_status"] in ("200", "400", "431") for call in site.edge.calls()[-60:])


def test_uploads_that_are_too_slow_leave_no_gateway_out(tmp_path: Path) -> None:
    hasty = ConnectionTimeouts(span_s=0.3, look_s=0.02)
    with (
        stub_gateway("first", hasty) as first,
        stub_gateway("second", hasty) as second,
        edge(tmp_path, [first.address, second.address]) as running,
        running.client() as client,
        ExitStack() as opened,
    ):
        peers = [opened.enter_context(running.connected()) for _ in range(20)]
        for peer in peers:
            peer.sendall(head("POST", "/v1/files", 1_000_000) + b"x")
        for peer in peers:
            # The gateway has ended the upload.
            assert_says(parsed(received(peer, b"}}")), OPENAI, UNCERTAIN_AT_EDGE)
        names = Counter(client.get("/v1/models").json()["gateway"] for _ in range(10))
        assert names == {"first": 5, "second": 5}


def test_followers_are_sent_on_by_a_gateway_that_drains(site: Site, client: httpx.Client) -> None:
    site.first.refusal = 503, {"retry-after": "1"}, b'{"error": {"code": "draining"}}'
    path = f"{NATIVE}/{REQUEST_ID}/events"
    assert {client.get(path).json()["gateway"] for _ in range(20)} == {"second"}
    site.second.refusal = site.first.refusal
    assert client.get(path).json() == {"error": {"code": "draining"}}
    # Only followers: to any other call it may have happened that it was accepted.
    site.second.refusal = None
    assert {client.post(NATIVE).status_code for _ in range(10)} == {200, 503}


# ------------------------------------------------------------------ callers


def test_an_address_has_a_rate_and_another_is_not_affected(site: Site) -> None:
    with site.edge.connected("127.0.0.9") as flood, site.edge.client(source="127.0.0.10") as other:
        answers, took_s = sent_at_once(flood, head("GET", "/nothing") * 6_000)
        statuses = statuses_of(answers)
        admitted, limited = statuses.count(404), statuses.count(429)
        assert admitted + limited == 6_000
        assert 1 + BURST <= admitted <= 1 + BURST + RATE_PER_S * took_s + 1
        assert limited > 0, f"it took {took_s:.1f} s to send so many"
        # The first that were too many in a second came after those that were not.
        assert set(statuses[: 1 + BURST]) == {404}
        assert other.get("/v1/models").status_code == 200
        with site.edge.client(source="127.0.0.9") as same:
            eventually(lambda: same.get("/v1/models").status_code == 200, what="a call after the flood")


@pytest.mark.parametrize(("path", "source"), [(NATIVE, "127.0.0.11"), (OPENAI, "127.0.0.12"), ("/x", "127.0.0.13")])
def test_a_call_beyond_the_rate_is_told_when_to_come_back(site: Site, path: str, source: str) -> None:
    with site.edge.connected(source) as flood:
        answers, _ = sent_at_once(flood, head("GET", "/nothing") * 6_000 + head("GET", path))
    error = GatewayError(429, RATE_LIMITED, "too many calls from this address", retry_after_ms=1_000)
    assert_says(parsed(ANSWER + answers[-1]), path, error)


def test_an_address_has_a_bound_of_calls_under_way(tmp_path: Path) -> None:
    with stub_gateway("one") as gateway:
        running = edge(tmp_path, [gateway.address], changes={"limit_conn calls 5000;": "limit_conn calls 3;"})
        with running as bounded, ExitStack() as opened:
            peers = [opened.enter_context(bounded.connected()) for _ in range(3)]
            for peer in peers:
                peer.sendall(head("POST", STREAM))
            eventually(lambda: gateway.under_way == 3, what="three streams")
            with bounded.client() as client, bounded.client(source="127.0.0.2") as other:
                assert client.get("/v1/models").status_code == 429
                assert other.get("/v1/models").status_code == 200
                for _ in range(3 * PIECES):
                    gateway.pieces.release()
                assert all(b"data: 2" in received(peer, b"\r\n0\r\n\r\n") for peer in peers)
                assert client.get("/v1/models").status_code == 200


def from_network(address: str) -> bytes:
    """What a balancer of connections says before the connection that it passes on."""
    return f"PROXY TCP6 {address} 2001:db8::1 50000 443\r\n".encode()


def test_an_ipv6_network_is_one_address(tmp_path: Path) -> None:
    site = ("set_real_ip_from 127.0.0.1;", "real_ip_header proxy_protocol;")
    with stub_gateway("one") as gateway:
        with edge(tmp_path, [gateway.address], site=site, listen="proxy_protocol") as running:

            def statuses(peers: Mapping[str, ssl.SSLSocket], address: str, count: int) -> list[int]:
                return statuses_of(sent_at_once(peers[address], head("GET", "/nothing") * count)[0])

            with ExitStack() as opened:
                addresses = ("2001:db8:1:2::1", "2001:db8:1:2:ffff::1", "2001:db8:1:3::1")
                mapped = ("::ffff:192.0.2.1", "::ffff:192.0.2.2")
                peers = {
                    address: opened.enter_context(running.connected(proxied=from_network(address)))
                    for address in (*addresses, *mapped)
                }
                # What one address of a network has left is nothing for another one right then.
                assert 429 in statuses(peers, addresses[0], 6_000)
                assert 429 in statuses(peers, addresses[1], BURST)
                assert set(statuses(peers, addresses[2], BURST)) == {404}
                assert 429 in statuses(peers, mapped[0], 6_000)
                assert set(statuses(peers, mapped[1], BURST)) == {404}
            with running.connected(proxied=from_network("2001:db8::9")) as peer:
                assert statuses_of(sent_at_once(peer, head("GET", "/v1/models"))[0]) == [200]
        assert gateway.calls[-1].values("x-forwarded-for") == ["2001:db8::9"]


def test_a_balancer_before_the_edge_may_say_whose_call_it_is(tmp_path: Path) -> None:
    site = ("set_real_ip_from 127.0.0.31;", "real_ip_header X-Forwarded-For;", "real_ip_recursive on;")
    said = {"x-forwarded-for": "203.0.113.7, 192.0.2.1, 127.0.0.31"}
    with stub_gateway("one") as gateway, edge(tmp_path, [gateway.address], site=site) as running:
        for source, address in (("127.0.0.31", "192.0.2.1"), ("127.0.0.32", "127.0.0.32")):
            with running.client(said, source) as client:
                assert client.get("/v1/models").json()["forwarded_for"] == [address]


@pytest.mark.parametrize(
    "forged",
    [
        [("x-forwarded-for", "203.0.113.7")],
        [("x-forwarded-for", "203.0.113.7"), ("X-Forwarded-For", "203.0.113.8, 203.0.113.9")],
        [("x-forwarded-for", ",".join(["203.0.113.7"] * 500))],
    ],
    ids=["one", "several", "many"],
)
def test_the_address_of_a_caller_cannot_be_forged(site: Site, forged: list[tuple[str, str]]) -> None:
    with site.edge.client(source="127.0.0.3") as client:
        assert client.get("/v1/models", headers=forged).json()["forwarded_for"] == ["127.0.0.3"]


# ------------------------------------------------------------------ bodies and answers


def test_a_slow_upload_holds_no_gateway(site: Site) -> None:
    with site.edge.connected() as peer:
        peer.sendall(head("POST", NATIVE, 1_000_000) + b"x" * 999_999)
        with site.edge.client() as other:
            # Both are asked, so what was sent before would have arrived.
            for _ in range(10):
                other.get("/v1/models")
        assert set(site.calls()) == {"/v1/models"}
        assert site.first.begun + site.second.begun == 10
        peer.sendall(b"x")
        assert status_of(received(peer, b"\r\n\r\n")) == 200
    assert site.calls().count(NATIVE) == 1


def test_a_full_disk_costs_only_calls_with_large_bodies(tmp_path: Path) -> None:
    with stub_gateway("one") as gateway, edge(tmp_path, [gateway.address]) as running, running.client() as client:
        # Nothing can be stored where a file is instead of a folder.
        buffered = running.nginx.folder / "bodies"
        buffered.rmdir()
        buffered.touch()
        assert_says(client.post(NATIVE, content=b"x" * 100_000), NATIVE, UNAVAILABLE_AT_EDGE)
        assert not gateway.calls
        assert client.post(NATIVE, content=b"x" * 10_000).status_code == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/collections/handbook/documents"])
def test_an_upload_is_not_stored_at_the_edge(site: Site, path: str) -> None:
    """The gateway decides by its head whether it wants it."""
    buffered = site.edge.nginx.folder / "bodies"
    with site.edge.connected() as peer:
        peer.sendall(head("POST", path, 5 * BODY_BYTES) + b"x" * BODY_BYTES)
        eventually(lambda: site.first.begun + site.second.begun == 1, what="the call at a gateway")
        assert not [file for file in buffered.rglob("*") if file.is_file()]
        peer.sendall(b"x" * 4 * BODY_BYTES)
        assert status_of(received(peer, b"\r\n\r\n")) == 200
    (call,) = site.first.calls + site.second.calls
    assert call.body_bytes == 5 * BODY_BYTES


def test_an_answer_leaves_the_gateway_at_once(site: Site) -> None:
    with site.edge.connected(receive_bytes=4_096) as peer:
        peer.sendall(head("GET", LARGE))
        eventually(lambda: LARGE in site.calls(), what="the call")
        # Its caller has not read a byte of it.
        eventually(lambda: site.first.under_way + site.second.under_way == 0, what="the end of the call")
        answer = received(peer, b"\r\n\r\n")
        assert status_of(answer) == 200


def test_a_stream_arrives_piece_by_piece(site: Site, client: httpx.Client) -> None:
    for gateway in (site.first, site.second):
        assert not gateway.pieces.acquire(blocking=False)
    with client.stream("POST", STREAM) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.iter_raw()
        came = ""
        for number in range(PIECES):
            # The next one is not sent before this one has arrived.
            for gateway in (site.first, site.second):
                if gateway.under_way:
                    gateway.pieces.release()
            while f"data: {number}\n\n" not in came:
                came += next(pieces).decode()
            assert f"data: {number + 1}" not in came


def test_a_websocket_passes_both_ways(site: Site) -> None:
    url = f"{site.edge.nginx.url.replace('https', 'wss')}/v1/requests/{REQUEST_ID}/events"
    with connect(url, ssl=site.edge.tls, open_timeout=PATIENCE_S) as websocket:
        for text in ("one", "another"):
            websocket.send(text)
            assert websocket.recv(PATIENCE_S) == text


def test_no_other_path_is_upgraded(site: Site, client: httpx.Client) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert client.get("/v1/models", headers=upgrade).status_code == 200
    (call,) = site.first.calls + site.second.calls
    assert not call.values("upgrade")
    assert call.values("connection") != ["upgrade"]


# ------------------------------------------------------------------ errors


UNAVAILABLE_AT_EDGE = GatewayError(
    503, UNAVAILABLE, "no gateway can be reached; nothing was accepted", retry_after_ms=1_000
)
UNCERTAIN_AT_EDGE = GatewayError(
    503, UNCERTAIN, "the gateway ended before it answered; it is not known what became of the call"
)
TOO_LARGE = GatewayError(413, Code.INVALID, "the body has too many bytes", field="body")
HEAD_TOO_LARGE = GatewayError(431, Code.INVALID, "the request line and the headers have too many bytes")
MALFORMED = GatewayError(400, Code.INVALID, "the call is not valid HTTP over TLS")
UNKNOWN = GatewayError(404, "not_found", "Not Found")


def assert_says(answer: httpx.Response, path: str, error: GatewayError) -> None:
    """It is what a gateway would say, with an id of its own."""
    expected = error_response(path, error)
    assert (answer.status_code, answer.json()) == (expected.status_code, json.loads(bytes(expected.body)))
    wanted: Mapping[str, str] = {name: value for name, value in expected.headers.items() if name != "content-length"}
    assert {name: answer.headers.get(name) for name in wanted} == wanted
    assert ("retry-after" in answer.headers) == ("retry-after" in wanted)
    assert ("x-should-retry" in answer.headers) == ("x-should-retry" in wanted)
    assert answer.headers["x-content-type-options"] == "nosniff"
    UUID(answer.headers["x-request-id"])


@pytest.mark.parametrize("path", [NATIVE, OPENAI])
@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (lambda path: head("POST", path, BODY_BYTES + 1), TOO_LARGE),
        (lambda path: head("GET", path + "?" + "a" * 15_000), HEAD_TOO_LARGE),
        (lambda path: head("GET", path, 0, "a: " + "b" * 15_000 + "\r\n"), HEAD_TOO_LARGE),
        (lambda path: head("GET", path, 0, ("a: " + "b" * 10_000 + "\r\n") * 4), HEAD_TOO_LARGE),
    ],
    ids=["body", "line", "header", "headers"],
)
def test_what_is_too_large_is_refused_as_by_a_gateway(
    site: Site, sent: Callable[[str], bytes], error: GatewayError, path: str
) -> None:
    with site.edge.connected() as peer:
        peer.sendall(sent(path))
        answer = said(peer)
    assert_says(answer, path, error)
    assert not site.first.begun + site.second.begun


def test_a_body_without_a_length_has_the_same_bound(site: Site, client: httpx.Client) -> None:
    pieces = (b"x" * 65_536 for _ in range(BODY_BYTES // 65_536 + 1))
    answer = client.post(NATIVE, content=pieces)
    assert_says(answer, NATIVE, TOO_LARGE)
    assert client.post(NATIVE, content=b"x" * BODY_BYTES).json()["body_bytes"] == BODY_BYTES


@pytest.mark.parametrize(
    "sent", [b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"]
)
def test_what_is_no_call_is_refused(site: Site, sent: bytes) -> None:
    with site.edge.connected() as peer:
        peer.sendall(sent)
        assert_says(said(peer), "/", MALFORMED)


def test_plain_http_is_refused(site: Site) -> None:
    answer = httpx.get(site.edge.nginx.url.replace("https", "http") + "/v1/models")
    assert_says(answer, OPENAI, MALFORMED)


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/health/ready", "/metrics", "/", "/nothing", "/v1", "/results", "/resultsx", "/inference/"),
        *("/docsx", "/.errors/malformed", "/.errors/head_too_large"),
        *("//health", "/v1/../health", "/v1/%2e%2e/health", "/v1/..%2fhealth", "/v1//..//metrics", "/%68ealth"),
    ],
)
def test_only_what_is_meant_for_callers_is_passed_on(site: Site, path: str) -> None:
    with site.edge.connected() as peer:
        peer.sendall(head("GET", path))
        assert_says(said(peer), "/", UNKNOWN)
    assert not site.first.begun + site.second.begun


@pytest.mark.parametrize("path", ["/v1/models", "/inference", "/results/1", "/docs", "/redoc", "/openapi.json"])
def test_what_is_meant_for_callers_is_passed_on(site: Site, client: httpx.Client, path: str) -> None:
    assert client.get(path).json()["path"] == path


def test_the_id_of_a_call_is_the_gateways(site: Site, client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"x-request-id": "mine"}).headers["x-request-id"] == REQUEST_ID
    ids = {client.get("/nothing", headers={"x-request-id": "mine"}).headers["x-request-id"] for _ in range(10)}
    assert len(ids) == 10
    logged = [call["call_id"] for call in site.edge.calls()]
    assert logged[-11] == REQUEST_ID
    assert set(logged[-10:]) == ids


def test_an_error_of_a_gateway_is_passed_on_as_it_is(site: Site, client: httpx.Client) -> None:
    for status in (400, 401, 403, 404, 405, 413, 429, 499, 500, 502, 503, 504):
        body = f'{{"error": {{"code": "of a gateway with {status}"}}}}'.encode()
        refusal = (status, {"retry-after": "7", "x-request-id": REQUEST_ID}, body)
        site.first.refusal = site.second.refusal = refusal
        answer = client.post(NATIVE, content=b"{}")
        assert (answer.status_code, answer.content) == (status, body)
        assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("7", REQUEST_ID)
    assert len(site.calls()) == 12


# ------------------------------------------------------------------ TLS, and what is logged


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is in no table (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_http_2_is_spoken(site: Site) -> None:
    site.edge.tls.set_alpn_protocols(["h2", "http/1.1"])
    try:
        peer = site.edge.connected()
    finally:
        site.edge.tls.set_alpn_protocols(["http/1.1"])
    with peer:
        assert peer.selected_alpn_protocol() == "h2"
        fields = ((b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"edge"), (b":path", b"/v1/models"))
        block = b"".join(literal(name, value) for name, value in fields)
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 5, 1, block))
        came = received(peer, b'"gateway"')
    assert b'"path": "/v1/models"' in came


def test_old_versions_of_tls_are_refused(site: Site) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(cafile=str(site.edge.nginx.certificates.ca_file))
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    plain = socket.create_connection(("127.0.0.1", site.edge.nginx.port), PATIENCE_S)
    with plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


def test_nothing_secret_is_logged(tmp_path: Path) -> None:
    secrets = {"authorization": f"Bearer {SECRET}", "cookie": SECRET, "referer": SECRET, "user-agent": SECRET}
    with (
        breaking_gateway() as breaking,
        no_gateway() as down,
        edge(tmp_path, [breaking.address, down]) as running,
        running.client(secrets) as client,
    ):
        for path in (NATIVE, f"/v1/{SECRET}", "/health", f"{NATIVE}/{SECRET}/events"):
            for method in ("GET", "POST"):
                client.request(method, f"{path}?key={SECRET}", content=SECRET.encode())
        with running.connected() as peer:
            peer.sendall(b"GET /?" + SECRET.encode() + b" HTTP/1.1\r\n" + b"a" * 20_000)
            peer.recv(1)
        eventually(lambda: len(running.calls()) == 9, what="a line for each call")
        logged = running.nginx.access_log.read_text() + running.nginx.log_file.read_text()
        assert [call["route"] for call in running.calls()[:2]] == ["/v1/requests"] * 2
    assert SECRET not in logged
