"""Process life cycle: signals, and an HTTP port for health and metrics that cannot disturb requests."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.processes import thread_times as _thread_times  # noqa: F401 - registers its metric

log = get_logger(__name__)

_SCRAPE_TIMEOUT_S = 5.0
LONGEST_SCRAPE_S = 10.0
MOST_SCRAPES = 16


class Readiness:
    """Named conditions that must all hold before a process is ready, and parts it works without. Thread-safe."""

    def __init__(self, *conditions: str) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, str | None] = dict.fromkeys(conditions, "not yet")
        self._degraded: dict[str, str] = {}

    def set(self, condition: str, reason: str | None = None) -> None:
        """Mark the condition as met (``reason`` None) or as not met for this reason."""
        with self._lock:
            self._reasons[condition] = reason
        metrics.READY.set(1 if self.ready else 0)

    @property
    def ready(self) -> bool:
        return all(reason is None for reason in self.reasons().values())

    def reasons(self) -> Mapping[str, str | None]:
        with self._lock:
            return dict(self._reasons)

    def degrade(self, part: str, reason: str | None) -> None:
        """Report a part that the process works without, and why; ``reason`` None: it is available again."""
        with self._lock:
            if reason is None:
                self._degraded.pop(part, None)
            else:
                self._degraded[part] = reason

    def degraded(self) -> Mapping[str, str]:
        with self._lock:
            return dict(self._degraded)


class _Server(ThreadingHTTPServer):
    """At most ``MOST_SCRAPES`` connections, one thread each; a further one closes the oldest. None lasts longer than
    ``LONGEST_SCRAPE_S``, however slow its client."""

    daemon_threads = True
    # A new process may take over the port of its predecessor; two live ones must not share it.
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}
        """Start time by connection, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MOST_SCRAPES:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are too old. Called twice a second."""
        too_old_s = time.monotonic() - LONGEST_SCRAPE_S
        with self._lock:
            for request in [one for one, began_s in self._open.items() if began_s < too_old_s]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class's signature
        log.debug("health_request_failed", client=str(client_address))


class HealthServer:
    """``/health``, ``/health/ready`` and ``/metrics`` on daemon threads. A port in use is logged, never fatal."""

    def __init__(self, readiness: Readiness, host: str, port: int) -> None:
        self._readiness = readiness
        self._host = host
        self._port = port
        self._server: _Server | None = None

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.server_address[1]

    def start(self) -> None:
        try:
            self._server = _Server((self._host, self._port), _handler(self._readiness))
        except OSError as error:
            log.error("metrics_port_unavailable", port=self._port, error=str(error))
            return
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()
        log.info("health_listening", host=self._host, port=self.port)

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _handler(readiness: Readiness) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SCRAPE_TIMEOUT_S
        error_message_format = "%(code)d\n"
        error_content_type = "text/plain"

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, "application/json", b'{"status": "alive"}\n')
            elif self.path == "/health/ready":
                ready = readiness.ready
                body = {
                    "status": "ready" if ready else "not_ready",
                    "conditions": readiness.reasons(),
                    "degraded": readiness.degraded(),
                }
                self._answer(200 if ready else 503, "application/json", json.dumps(body).encode() + b"\n")
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest())
            else:
                self._answer(404, "text/plain", b"there is /health, /health/ready and /metrics\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def send_response(self, code: int, message: str | None = None) -> None:
            # The base class would add a Server header.
            self.send_response_only(code, message)
            self.send_header("Date", self.date_time_string())
            self.send_header("X-Content-Type-Options", "nosniff")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    return Handler


def exit_after(timeout_s: float) -> threading.Timer:
    """End the process with status 1 after ``timeout_s``, unless the returned timer is cancelled before.

    A hung shutdown must not keep a dead process in its slot.
    """

    def end() -> None:
        log.error("shutdown_hung", timeout_s=timeout_s)
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    return timer


class StopSignal:
    """Set by SIGTERM and SIGINT. A second signal has its default effect."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> None:
        """Install the signal handlers; main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.stop()

    def stop(self) -> None:
        self._event.set()

    @property
    def stopping(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._event.wait(timeout_s)
