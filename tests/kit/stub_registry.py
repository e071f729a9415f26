"""An MLflow server that answers what a test tells it."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

VERSION: dict[str, Any] = {"model_version": {"name": "m", "version": "3", "run_id": "r"}}
ROOT = "mlflow-artifacts:/0/r/artifacts/model"


class StubRegistry:
    """Answers by the last part of the path: JSON values, functions of the query, or a status with bytes and headers.
    While ``drips`` is set, a body comes a byte every 20 ms."""

    def __init__(self) -> None:
        self.drips = threading.Event()
        self.closing = threading.Event()
        self.answers: dict[str, Any] = {
            "get": VERSION,
            "alias": VERSION,
            "get-download-uri": {"artifact_uri": ROOT},
            "artifacts": {"files": [{"path": "a", "is_dir": False, "file_size": "1"}]},
        }
        self.seen: list[tuple[str, dict[str, list[str]], dict[str, str]]] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                registry.seen.append((parts.path, parse_qs(parts.query), dict(self.headers)))
                name = "runs" if parts.path.endswith("runs/get") else parts.path.rpartition("/")[2]
                answer = registry.answers.get(name, {})
                if callable(answer):
                    answer = answer(parse_qs(parts.query))
                status, body, headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})
                self.send_response(status)
                for header, value in headers.items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                pieces = [body[at : at + 1] for at in range(len(body))] if registry.drips.is_set() else [body]
                with suppress(ConnectionError):
                    for piece in pieces:
                        self.wfile.write(piece)
                        if len(pieces) > 1:
                            registry.closing.wait(0.02)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
