"""A server with OpenAI's ``/v1/embeddings`` that answers with the shipped static model, until it is told otherwise."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fairlane_server.retrieval.static_embedder import StaticEmbedder

KEY = "the-key-of-this-test"


@dataclass
class Answer:
    """What it answers instead of vectors; ``body`` None keeps the connection open and says nothing."""

    status: int = 200
    body: bytes | None = b""
    headers: dict[str, str] = field(default_factory=dict)
    drips: bool = False
    """A byte at a time, for ever."""


@dataclass
class EmbeddingServer:
    """``answers`` are given to the next requests, one each."""

    static: StaticEmbedder
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def vectors(self, texts: list[str]) -> Any:
        """A good answer, the last one first, as a server may order them."""
        rows = self.static.embed(texts).tolist()
        entries = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return {"object": "list", "data": entries[::-1], "model": "static", "usage": {"prompt_tokens": 1}}


@contextmanager
def embedding_server(static: StaticEmbedder) -> Iterator[EmbeddingServer]:
    """Runs while the context is open."""
    served = EmbeddingServer(static)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.keys.append(self.headers.get("Authorization"))
            served.requests.append(request)
            if self.path != "/v1/embeddings":
                answer = Answer(404, b"")
            elif served.answers:
                answer = served.answers.pop(0)
            else:
                answer = Answer(body=json.dumps(served.vectors(request["input"])).encode())
            try:
                self._send(answer)
            except ConnectionError:
                self.close_connection = True

        def _send(self, answer: Answer) -> None:
            if answer.body is None:
                served.over.wait(30)
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.drips:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while not served.over.wait(0.01):
                    self.wfile.write(b"1\r\n \r\n")
                return
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            served.over.set()
            server.shutdown()
            thread.join(10)
