"""Serves an application until SIGTERM, and then until its calls are answered."""

from time import monotonic
from types import FrameType
from typing import Protocol

import uvicorn

from fairlane import logs
from fairlane.service import HealthServer, exit_after
from fairlane.settings import Settings
from producers.gateway.app import Gateway
from producers.gateway.edge.limited_protocol import LimitedProtocol

log = logs.get_logger(__name__)

_ANSWERS_S = 2.0
"""For the answers to those who are not waited for any longer."""
_GRACE_S = 2
_EXIT_MARGIN_S = 6.0
_KEEP_ALIVE_S = 75


class Served(Protocol):
    """What of a ``Gateway`` is needed here."""

    @property
    def open_calls(self) -> int: ...

    @property
    def failure(self) -> BaseException | None: ...

    def drain(self) -> None: ...

    def end_waiting(self) -> None: ...


class GatewayServer(uvicorn.Server):
    """After the first signal calls go on, new ones are refused with 503, and it ends when none is left. Those that are
    left after ``drain_timeout_s``, or when the gateway cannot go on, are answered that their requests do. A second
    signal ends it at once."""

    def __init__(self, config: uvicorn.Config, gateway: Served, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain_timeout_s = drain_timeout_s
        self._ends_at: float | None = None
        self._exits_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the base class's signature
        # Not noted as the base class does: it would raise the signal again in the end, and the status would not be 0.
        if self._ends_at is not None:
            self.should_exit = self.force_exit = True
            return
        self._ends_at = monotonic() + self._drain_timeout_s
        exit_after(self._drain_timeout_s + _EXIT_MARGIN_S)
        self._gateway.drain()

    async def on_tick(self, counter: int) -> bool:
        now = monotonic()
        if self._ends_at is None and self._gateway.failure is not None:
            self._ends_at = now
        if self._ends_at is not None:
            is_late = self._gateway.failure is not None or now > self._ends_at
            if is_late and self._exits_at is None:
                self._exits_at = now + _ANSWERS_S
                self._gateway.end_waiting()
            if not self._gateway.open_calls or (self._exits_at is not None and now > self._exits_at):
                self.should_exit = True
        return await super().on_tick(counter)


def main() -> int:
    """Run a gateway in this process. Returns the exit status: 0 after a stop signal, 1 when it cannot go on."""
    settings = Settings()
    logs.configure(settings, "gateway")
    try:
        gateway = Gateway(settings)
    except ValueError as error:
        log.error("gateway_failed", reason=str(error))
        return 1
    health = HealthServer(gateway.readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    config = uvicorn.Config(
        gateway.app,
        host=settings.gateway_host,
        port=settings.gateway_port,
        loop="uvloop",
        http=LimitedProtocol,
        ws="websockets-sansio",
        ws_max_size=settings.gateway_max_body_bytes,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = GatewayServer(config, gateway, settings.drain_timeout_s)
    try:
        server.run()
    except SystemExit:
        # Of uvicorn, when it could not begin: the reason is in the log.
        return 1
    finally:
        health.stop()
    return 0 if gateway.failure is None and server.started else 1
