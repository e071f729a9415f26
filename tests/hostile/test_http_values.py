"""Values and bytes that no client means well: each gets an error that names the field and the reason, never a 500."""

import json
import socket
import threading
from collections.abc import Iterator
from itertools import cycle
from typing import Any, Final

import httpx
import pytest

from benchmarks.processes import resident_bytes
from tests.kit.gateway_kit import Served, serving
from tests.kit.http_kit import PeakMemory, bound_ms, connected, honest, report
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone, pytest.mark.timeout(900)]

MOST_GROWTH_BYTES = 64 * 1024 * 1024
DEEP: Final = 100_000
NUMBER: Final = "9" * 5_000

# Of the text of a JSON body: what its marks stand for is not JSON, or not what it looks like.
LITERALS: Final = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "minus Infinity": "-Infinity",
    "5,000 digits": NUMBER,
    "5,000 digits and a point": NUMBER + ".5",
    "a huge exponent": "1e999999999",
    "a lone high surrogate": '"\\ud800"',
    "a lone low surrogate": '"x\\udc00y"',
    "NUL": '"a\\u0000b"',
    "a bare NUL": '"a\x00b"',
    "CRLF": '"a\\r\\nset-cookie: b"',
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "unclosed lists": "[" * DEEP,
    "a duplicate key": '{"a": 1, "a": 2}',
    "a boolean": "true",
    "null": "null",
    "an empty list": "[]",
    "a list of everything": '[null, 1, "x", {}, [], 1e400]',
}
NATIVE: Final = {
    "model": '{"model": @, "input": {"prompt": "x"}}',
    "input": '{"model": "MODEL", "input": @}',
    "input.prompt": '{"model": "MODEL", "input": {"prompt": @}}',
    "input.texts": '{"model": "MODEL", "task": "embed", "input": {"texts": [@]}}',
    "input.image": '{"model": "MODEL", "task": "classify", "input": {"image": @}}',
    "parameters.max_tokens": '{"model": "MODEL", "input": {"prompt": "x"}, "parameters": {"max_tokens": @}}',
    "parameters.temperature": '{"model": "MODEL", "input": {"prompt": "x"}, "parameters": {"temperature": @}}',
    "parameters.seed": '{"model": "MODEL", "input": {"prompt": "x"}, "parameters": {"seed": @}}',
    "parameters.stop": '{"model": "MODEL", "input": {"prompt": "x"}, "parameters": {"stop": @}}',
    "timeout_ms": '{"model": "MODEL", "input": {"prompt": "x"}, "timeout_ms": @}',
    "metadata": '{"model": "MODEL", "input": {"prompt": "x"}, "metadata": @}',
    "metadata.key": '{"model": "MODEL", "input": {"prompt": "x"}, "metadata": {"k": @}}',
    "group": '{"model": "MODEL", "input": {"prompt": "x"}, "group": @}',
    "conversation_id": '{"model": "MODEL", "input": {"prompt": "x"}, "conversation_id": @}',
    "conversation_after": '{"model": "MODEL", "input": {"prompt": "x"}, "conversation_id": "c", '
    '"conversation_after": @}',
    "retrieval": '{"model": "MODEL", "input": {"prompt": "x"}, "retrieval": @}',
    "retrieval.collection": '{"model": "MODEL", "input": {"prompt": "x"}, "retrieval": {"collection": @}}',
    "unknown": '{"model": "MODEL", "input": {"prompt": "x"}, "unknown": @}',
    "": "@",
}
CHAT: Final = {
    "model": '{"model": @, "messages": [{"role": "user", "content": "x"}]}',
    "messages": '{"model": "MODEL", "messages": @}',
    "messages[0]": '{"model": "MODEL", "messages": [@]}',
    "messages[0].content": '{"model": "MODEL", "messages": [{"role": "user", "content": @}]}',
    "messages[0].name": '{"model": "MODEL", "messages": [{"role": "user", "content": "x", "name": @}]}',
    "temperature": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "temperature": @}',
    "max_tokens": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "max_tokens": @}',
    "seed": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "seed": @}',
    "stop": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "stop": @}',
    "logit_bias": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "logit_bias": @}',
    "user": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "user": @}',
    "fairlane": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "fairlane": @}',
    "fairlane.timeout_ms": '{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], '
    '"fairlane": {"timeout_ms": @}}',
}
OTHERS: Final = {
    "/v1/embeddings": ('{"model": "MODEL", "input": @}', '{"model": "MODEL", "input": ["x"], "dimensions": @}'),
    "/v1/completions": ('{"model": "MODEL", "prompt": @}', '{"model": "MODEL", "prompt": "x", "n": @}'),
    "/v1/rank": (
        '{"model": "MODEL", "query": @, "documents": ["x"]}',
        '{"model": "MODEL", "query": "x", "documents": [@]}',
        '{"model": "MODEL", "query": "x", "documents": ["x"], "top_n": @}',
    ),
    "/v1/classify": ('{"model": "MODEL", "image": @}',),
    "/v1/batches": (
        '{"input_file_id": @, "endpoint": "/v1/embeddings", "completion_window": "24h"}',
        '{"input_file_id": "x", "endpoint": "/v1/embeddings", "completion_window": "24h", "metadata": @}',
        '{"input_file_id": "x", "endpoint": "/v1/embeddings", "completion_window": "24h", "metadata": {"k": @}}',
    ),
}
NOT_UTF8: Final = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xfe\xff\x00{", b"\x00")
TARGETS: Final = (
    "/v1/requests/%00",
    "/v1/requests/%ff%fe",
    "/v1/requests/%",
    "/v1/requests/%zz",
    "/v1/requests/%ed%a0%80",
    "/v1/requests/%0d%0aset-cookie:%20x",
    "/v1/requests/" + "a" * 5_000,
    "/v1/requests/..%2f..%2fetc",
    "/v1/results/%00",
    "/v1/results/%ff",
    "/v1/models/%00",
    "/v1/models/%ff%2f",
    "/v1/models/%0d%0a",
    "/v1/files/%00",
    "/v1/files/%ff/content",
    "/v1/files?limit=" + NUMBER,
    "/v1/files?limit=NaN",
    "/v1/files?after=%00",
    "/v1/files?after=%ff%fe",
    "/v1/files?purpose=%00",
    "/v1/files?limit=1&limit=%00",
    "/v1/batches?limit=" + NUMBER,
    "/v1/batches?after=%ed%a0%80",
    "/v1/batches/%00",
    "/v1/history?limit=" + NUMBER,
    "/v1/history?cursor=%00",
    "/v1/history?cursor=%ff%fe%fd",
    "/v1/history?after=" + NUMBER,
    "/v1/requests?limit=" + NUMBER,
    "/v1/requests?cursor=%00&status=%00&model=%ff",
    "/v1/requests?from=1e400&to=NaN",
    "/v1/conversations/%00",
    "/v1/requests/%00/events",
    "/%00",
    "/%ff%fe",
    "//v1/models",
    "/v1/models?" + "&".join(f"a{n}=%ff" for n in range(1_000)),
)
HEADERS: Final = {
    "idempotency-key": (b"\xff\xfe", b"a" * 20_000, b"\x80", b"caf\xc3\xa9", b"", b" "),
    "authorization": (
        b"Bearer \xff",
        b"Bearer " + b"a" * 20_000,
        b"Basic \xff",
        b"Bearer a.b.c",
        b"Bearer " + b"." * 9,
    ),
    "x-api-key": (b"\xff", b"fl_" + b"\xff" * 60),
    "traceparent": (b"\xff" * 55, b"00-" + b"g" * 32 + b"-" + b"0" * 16 + b"-01", b"a" * 20_000),
    "tracestate": (b"\xff=\xff", b"a=" + b"b" * 20_000),
    "last-event-id": (b"\xff", NUMBER.encode()),
    "content-type": (b"\xff", b"application/json; charset=\xff", b"text/plain"),
    "accept": (b"\xff",),
    "range": (b"bytes=" + NUMBER.encode() + b"-",),
    "prefer": (b"wait=" + NUMBER.encode(),),
}
FORMS: Final = {
    "no boundary": (b"multipart/form-data", b"x"),
    "an empty boundary": (b"multipart/form-data; boundary=", b"x"),
    "a boundary of 10,000": (b"multipart/form-data; boundary=" + b"x" * 10_000, b"x"),
    "a boundary that is no text": (b"multipart/form-data; boundary=\xff\xfe", b"--\xff\xfe\r\n\r\n"),
    "no part": (b"multipart/form-data; boundary=e", b"--e--\r\n"),
    "no end": (b"multipart/form-data; boundary=e", b'--e\r\ncontent-disposition: form-data; name="file"\r\n\r\nx'),
    "no name": (b"multipart/form-data; boundary=e", b"--e\r\ncontent-disposition: form-data\r\n\r\nx\r\n--e--\r\n"),
    "no disposition": (b"multipart/form-data; boundary=e", b"--e\r\n\r\nx\r\n--e--\r\n"),
    "a head without end": (b"multipart/form-data; boundary=e", b"--e\r\nx: " + b"y" * 1_000_000),
    "many heads": (b"multipart/form-data; boundary=e", b"--e\r\n" + b"x: y\r\n" * 100_000),
    "many fields": (
        b"multipart/form-data; boundary=e",
        b'--e\r\ncontent-disposition: form-data; name="a"\r\n\r\nx\r\n' * 10_000 + b"--e--\r\n",
    ),
    "a large field": (
        b"multipart/form-data; boundary=e",
        b'--e\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 1_000_000 + b"\r\n--e--\r\n",
    ),
    "many files": (
        b"multipart/form-data; boundary=e",
        b'--e\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n' * 100 + b"--e--\r\n",
    ),
    "a charset that is none": (
        b"multipart/form-data; boundary=e; charset=rot13",
        b'--e\r\ncontent-disposition: form-data; name="file"; filename="\xff"\r\n\r\nx\r\n--e--\r\n',
    ),
    "an urlencoded form": (b"application/x-www-form-urlencoded", b"file=%ff&purpose=%00"),
}
_POST: Final = b"POST /v1/requests HTTP/1.1\r\nhost: g\r\nKEY"
STREAMS: Final = {
    "a chunk that lies": _POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    "a chunk that is no number": _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nx\r\n",
    "trailers": _POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    b"x-trailer: \xff\r\nauthorization: Bearer other\r\n\r\n",
    "two lengths": _POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
    "a length and chunks": _POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    "a negative length": _POST + b"content-length: -1\r\n\r\n{}",
    "a length of 5,000 digits": _POST + b"content-length: " + NUMBER.encode() + b"\r\n\r\n{}",
    "a length that is none": _POST + b"content-length: \xb2\r\n\r\n{}",
    "a body that is shorter": _POST + b"connection: close\r\ncontent-length: 2\r\n\r\n{",
    "a body that is longer": _POST + b"content-length: 2\r\n\r\n{}{}{}",
    "a bare line feed": b"POST /v1/requests HTTP/1.1\nhost: g\n\n{}",
    "a header with NUL": b"GET /v1/models HTTP/1.1\r\nhost: g\r\nKEYx: a\x00b\r\n\r\n",
    "a folded header": b"GET /v1/models HTTP/1.1\r\nhost: g\r\nKEYx: a\r\n b\r\n\r\n",
    "a target that is none": b"GET \xff\xfe HTTP/1.1\r\nhost: g\r\nKEY\r\n",
    "a target with a bad port": b"GET http://g:99999999/ HTTP/1.1\r\nhost: g\r\nKEY\r\n",
    "CONNECT": b"CONNECT g:443 HTTP/1.1\r\nhost: g\r\nKEY\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nhost: g\r\nKEY\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nhost: g\r\nKEY\r\n",
}


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("values")
    patient = {"GATEWAY_FAILED_KEYS_PER_S": "1000", "FILES_URL": str(folder / "files"), "GATEWAY_WAIT_S": "20"}
    with serving(broker, postgres, folder, redis_url=redis_url, gateway_env=patient) as served:
        yield served


def check(answer: httpx.Response, what: str) -> None:
    """Not a mistake of the gateway's; and what is refused is refused with a reason, in words."""
    assert answer.status_code < 500 or answer.status_code in (503, 504), (what, answer.status_code, answer.text)
    assert "server" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in answer.headers
    if answer.status_code >= 400 and answer.headers.get("content-type", "").startswith("application/json"):
        error = answer.json()["error"]
        assert error["message"], what
        assert NUMBER not in answer.text, what


def mistakes(served: Served) -> list[dict[str, Any]]:
    return served.pipeline.processes["gateway-1"].events("call_failed")


def test_no_value_is_a_mistake_of_the_gateways(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    model = served.pipeline.model_for("generate")
    bodies = [("/v1/requests", field, text) for field, text in NATIVE.items()]
    bodies += [("/inference", field, text) for field, text in list(NATIVE.items())[:1]]
    bodies += [("/v1/chat/completions", field, text) for field, text in CHAT.items()]
    bodies += [(path, "", text) for path, texts in OTHERS.items() for text in texts]
    with honest(served) as traffic, served.client() as client:
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        json_type = {"content-type": "application/json"}
        for path, field, text in bodies:
            body = text.replace("MODEL", model)
            for what, literal in LITERALS.items():
                sent = body.replace("@", literal).encode()
                answer = client.post(path, content=sent, headers=json_type)
                check(answer, f"{what} as {field} of {path}")
                if path == "/v1/requests" and answer.status_code == 400 and field and "deep" not in what:
                    told = answer.json()["error"]
                    assert told["field"], (what, field, told)
        for path in ("/v1/requests", "/v1/chat/completions", "/v1/embeddings", "/v1/batches", "/v1/rank"):
            for raw in NOT_UTF8:
                assert client.post(path, content=b'{"model": "a", "model": "b"}').status_code == 400
                for sent in (raw, b'{"model": "' + raw + b'"}', b'{"' + raw + b'": 1}'):
                    answer = client.post(path, content=sent, headers=json_type)
                    check(answer, f"{sent!r} to {path}")
                    assert answer.status_code == 400
        beside_ms = traffic.p99_ms(100)
        after_bytes = resident_bytes(pid)
    report(before=before_bytes, peak=after_bytes, after=after_bytes, quiet_ms=quiet_ms, beside_ms=beside_ms)
    assert mistakes(served) == []
    assert after_bytes < before_bytes + MOST_GROWTH_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive


def test_bodies_of_many_values_hold_up_nobody(served: Served) -> None:
    """A million of them in 3 MiB: made before they are counted, each body would stop all calls for a second."""
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    many = 1_000_000
    bodies = (
        b'{"model": "x", "messages": [' + b",".join([b"{}"] * many) + b"]}",
        b'{"model": "x", "input": {"prompt": "x"}, "metadata": {' + b",".join([b'"":""'] * (many // 2)) + b"}}",
        b'{"model": "x", "input": {"texts": [' + b",".join([b'""'] * many) + b"]}}",
        b"[" * many,
    )
    ended = threading.Event()
    statuses = set[int]()

    def attack() -> None:
        with served.client() as client:
            for body in cycle(bodies):
                if ended.is_set():
                    return
                statuses.add(client.post("/v1/requests", content=body).status_code)

    with honest(served) as traffic:
        quiet_ms = traffic.p99_ms()
        before_bytes = resident_bytes(pid)
        attacker = threading.Thread(target=attack, daemon=True)
        with PeakMemory(pid) as memory:
            attacker.start()
            beside_ms = traffic.p99_ms()
            ended.set()
            attacker.join(PATIENCE_S)
    report(
        before=before_bytes, peak=memory.peak_bytes, after=resident_bytes(pid), quiet_ms=quiet_ms, beside_ms=beside_ms
    )
    assert statuses == {400}
    assert memory.peak_bytes < before_bytes + MOST_GROWTH_BYTES
    assert beside_ms <= bound_ms(quiet_ms)
    assert gateway.pid == pid
    assert gateway.alive


def test_no_target_header_or_form_is_a_mistake_of_the_gateways(served: Served) -> None:
    pid = served.pipeline.processes["gateway-1"].pid
    key = served.headers()["authorization"].encode()
    with honest(served):
        for target in TARGETS:
            for method in (b"GET", b"DELETE", b"POST"):
                call = method + b" " + target.encode() + b" HTTP/1.1\r\nhost: g\r\nauthorization: " + key + b"\r\n"
                said = exchanged(served, call + b"content-length: 2\r\nconnection: close\r\n\r\n{}")
                check_bytes(said, f"{method!r} {target[:60]}")
        body = json.dumps(served.question()).encode()
        for name, values in HEADERS.items():
            for value in values:
                shown = b"" if name in ("authorization", "x-api-key") else b"authorization: " + key + b"\r\n"
                for method, path in ((b"POST", b"/v1/requests"), (b"GET", b"/v1/models"), (b"POST", b"/v1/batches")):
                    call = method + b" " + path + b" HTTP/1.1\r\nhost: g\r\n" + shown
                    call += name.encode() + b": " + value + b"\r\nconnection: close\r\n"
                    said = exchanged(served, call + b"content-length: %d\r\n\r\n" % len(body) + body)
                    check_bytes(said, f"{name}: {value[:60]!r}")
        for what, (media_type, form) in FORMS.items():
            call = b"POST /v1/files HTTP/1.1\r\nhost: g\r\nauthorization: " + key + b"\r\nconnection: close\r\n"
            call += b"content-type: " + media_type + b"\r\ncontent-length: %d\r\n\r\n" % len(form) + form
            said = exchanged(served, call)
            check_bytes(said, what)
            assert said.startswith(b"HTTP/1.1 400 "), (what, said)
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["param"] in ("file", "purpose"), (what, said)
    assert mistakes(served) == []
    assert served.pipeline.processes["gateway-1"].pid == pid


def test_no_framing_is_a_mistake_of_the_gateways(served: Served) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    key = b"authorization: " + served.headers()["authorization"].encode() + b"\r\n"
    with honest(served):
        for what, stream in STREAMS.items():
            with connected(served) as peer:
                peer.sendall(stream.replace(b"KEY", key))
                peer.shutdown(socket.SHUT_WR)
                check_bytes(all_of(peer), what)
    eventually(lambda: gateway.metric("fairlane_gateway_body_bytes") == 0, what="no body that is held")
    assert mistakes(served) == []
    assert gateway.pid == pid
    assert gateway.alive


def test_what_is_not_for_callers_is_not_on_their_port(served: Served) -> None:
    with served.client() as client:
        for path in ("/metrics", "/metrics/", "/health/../metrics", "/v1/../metrics"):
            assert client.get(path).status_code == 404
        answer = client.get("/health")
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert "server" not in answer.headers


def exchanged(served: Served, call: bytes) -> bytes:
    with connected(served) as peer:
        peer.sendall(call)
        return all_of(peer)


def all_of(peer: socket.socket) -> bytes:
    said = b""
    try:
        while piece := peer.recv(65_536):
            said += piece
    except ConnectionError:
        # After the answer, to what came behind it.
        pass
    return said


def check_bytes(said: bytes, what: str) -> None:
    """Either nothing, where the caller ended before its call did, or an answer that is no mistake of the gateway's."""
    if not said:
        return
    head = said.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    status = int(head[0].split()[1])
    assert status < 500 or status in (503, 504), (what, said)
    fields = [line.partition(b":")[0] for line in head[1:]]
    assert b"x-content-type-options" in fields, (what, said)
    assert b"server" not in fields, (what, said)
    assert b"set-cookie" not in fields, (what, said)
