"""Small model servers on real sockets: OpenAI's interface and the Open Inference Protocol, without a model.

Answers follow from the request alone. ``python -m tests.kit.model_servers openai`` runs one until it is killed, and
prints its URL.
"""

import hashlib
import json
import math
import ssl
import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import trustme

MODEL = "tiny"
LABELS = tuple(f"label-{number}" for number in range(10))
CONTEXT_TOKENS = 512
_WORDS = ("sea", "sky", "wind", "stone", "tree", "river", "light", "house", "road", "bird", "snow", "fire")
_DEFAULT_TOKENS = 9
_GATE_S = 30.0


@dataclass(frozen=True)
class ScriptedAnswer:
    """What the next request gets instead. ``cut_after``: the connection breaks after so many events."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None


@dataclass
class ModelServer:
    """What a server was asked, and what it is told to do. While ``gate`` is not set, it answers nothing of a POST, and
    of a stream nothing but the first event."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    scripted: list[ScriptedAnswer] = field(default_factory=list)
    check_status: int = 200
    check_body: bytes | None = None
    """What a GET gets in place of a document."""
    gate: threading.Event = field(default_factory=threading.Event)
    active: int = 0
    peak: int = 0
    disconnected: int = 0
    """Streams whose client went away."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate.set()

    @abstractmethod
    def check(self, path: str) -> tuple[int, Any]:
        """The answer to a GET."""

    @abstractmethod
    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The answer to a POST: a document, or the list of a stream's events."""


class OpenAiModelServer(ModelServer):
    """Words that the prompt determines, one a token."""

    def check(self, path: str) -> tuple[int, Any]:
        return (self.check_status, {"data": [{"id": MODEL}]}) if path == "/v1/models" else (404, {})

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/v1/chat/completions":
                return self._generated(body, json.dumps(body["messages"]), is_chat=True)
            case "/v1/completions":
                return self._generated(body, body["prompt"], is_chat=False)
            case "/v1/embeddings":
                vectors = [{"index": at, "embedding": _numbers(text, 8)} for at, text in enumerate(body["input"])]
                return 200, {"data": vectors[::-1], "usage": {"prompt_tokens": sum(map(_tokens, body["input"]))}}
            case _:
                return 404, {"error": {"message": "no such path"}}

    def _generated(self, body: dict[str, Any], prompt: Any, *, is_chat: bool) -> tuple[int, Any]:
        prompt_tokens = len(prompt) if isinstance(prompt, list) else _tokens(prompt)
        if prompt_tokens + body["max_tokens"] > CONTEXT_TOKENS:
            return 400, {"error": {"message": f"maximum context length is {CONTEXT_TOKENS} tokens", "type": "x"}}
        number = int.from_bytes(hashlib.sha256(str(prompt).encode()).digest())
        count = min(body["max_tokens"], _DEFAULT_TOKENS)
        words = [_WORDS[number // 12**place % 12] for place in range(count)]
        parts = words[:1] + [f" {word}" for word in words[1:]]
        reason = "length" if count < _DEFAULT_TOKENS else "stop"
        text = "".join(parts)
        if found := [at for stop in body.get("stop", ()) if (at := text.find(stop)) >= 0]:
            parts, reason = [text[: min(found)]], "stop"
        events: list[dict[str, Any]] = [{"choices": [self._choice(part, body, is_chat=is_chat)]} for part in parts]
        events.append({"choices": [{"finish_reason": reason, ("delta" if is_chat else "text"): {} if is_chat else ""}]})
        if body.get("stream_options", {}).get("include_usage"):
            events.append({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count}})
        return 200, events

    @staticmethod
    def _choice(part: str, body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
        if not is_chat:
            logprobs = {"tokens": [part], "token_logprobs": [-0.5], "top_logprobs": [{part: -0.5, "other": -1.0}]}
            return {"text": part} | ({"logprobs": logprobs} if "logprobs" in body else {})
        top = [{"token": part, "logprob": -0.5}, {"token": "other", "logprob": -1.0}]
        content = [{"token": part, "logprob": -0.5, "top_logprobs": top[: body.get("top_logprobs", 0)]}]
        return {"delta": {"content": part}} | ({"logprobs": {"content": content}} if body.get("logprobs") else {})


class V2ModelServer(ModelServer):
    """Numbers that the inputs determine."""

    def check(self, path: str) -> tuple[int, Any]:
        known = {"/v2/health/ready", f"/v2/models/{MODEL}/ready", f"/v2/models/{MODEL}/versions/3/ready"}
        return (self.check_status, {}) if path in known else (404, {})

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path not in {f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/3/infer"}:
            return 404, {"error": "no such model"}
        inputs = {tensor["name"]: tensor for tensor in body["inputs"]}
        for tensor in inputs.values():
            if math.prod(tensor["shape"]) != len(tensor["data"]):
                return 400, {"error": "the shape does not fit the data"}
        if "pixels" in inputs:
            [pixels] = [inputs["pixels"]["data"]]
            logits = [sum(pixels[at::10]) - sum(pixels) / 10 for at in range(10)]
            return 200, _tensor("logits", [1, 10], logits)
        if "text" in inputs:
            texts = inputs["text"]["data"]
            if any(_tokens(text) > CONTEXT_TOKENS for text in texts):
                return 400, {"error": "the text exceeds the maximum of 512 tokens"}
            return 200, _tensor("embedding", [len(texts), 8], [_numbers(text, 8) for text in texts])
        pairs = zip(inputs["query"]["data"], inputs["document"]["data"], strict=True)
        scores = [_numbers(query + document, 1)[0] for query, document in pairs]
        return 200, _tensor("score", [len(scores), 1], scores)


def _tensor(name: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"model_name": MODEL, "outputs": [{"name": name, "shape": shape, "datatype": "FP32", "data": data}]}


def _tokens(text: str) -> int:
    return 1 + len(text) // 4


def _numbers(text: str, count: int) -> list[float]:
    digest = hashlib.sha256(text.encode()).digest()
    return [digest[at] / 255 + 0.01 for at in range(count)]


def _handler(served: ModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, document = served.check(self.path)
            self._send(status, json.dumps(document).encode() if served.check_body is None else served.check_body, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.requests.append(body)
                served.headers.append(dict(self.headers.items()))
                served.active += 1
                served.peak = max(served.peak, served.active)
                scripted = served.scripted.pop(0) if served.scripted else None
            try:
                self._answer(body, scripted)
            except ConnectionError:
                self.close_connection = True
                with served.lock:
                    served.disconnected += 1
            finally:
                with served.lock:
                    served.active -= 1

        def _answer(self, body: dict[str, Any], scripted: ScriptedAnswer | None) -> None:
            if scripted is not None and scripted.cut_after is None:
                self._send(scripted.status, scripted.body, scripted.headers)
                return
            status, document = served.answer(self.path, body)
            if isinstance(document, list):
                self._stream(document, None if scripted is None else scripted.cut_after)
            else:
                served.gate.wait(_GATE_S)
                self._send(status, json.dumps(document).encode(), {})

        def _stream(self, events: list[Any], cut_after: int | None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, event in enumerate([*map(json.dumps, events), "[DONE]"]):
                if number == cut_after:
                    self.close_connection = True
                    return
                if number and not served.gate.is_set():
                    self._wait_for_gate()
                data = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

        def _wait_for_gate(self) -> None:
            """With comments meanwhile, which show whether the client is still there."""
            while not served.gate.wait(0.01):
                self.wfile.write(b"3\r\n: \n\r\n")

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def model_server(served: ModelServer, certificate: trustme.LeafCert | None = None) -> Iterator[None]:
    """Runs while the context is open."""
    with _server(served) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            served.url = served.url.replace("http:", "https:")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            served.gate.set()
            server.shutdown()
            thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that resets a connection between two requests is no error of the server."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _server(served: ModelServer) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), _handler(served))
    served.url = f"http://127.0.0.1:{server.server_port}"
    return server


def main() -> None:
    served = {"openai": OpenAiModelServer, "v2": V2ModelServer}[sys.argv[1]]()
    # Of a stream nothing but the first event, until it is killed.
    if "held" in sys.argv:
        served.gate.clear()
    with _server(served) as server:
        print(served.url, flush=True)  # noqa: T201 - read by the test
        server.serve_forever()


if __name__ == "__main__":
    main()
