"""Serves an application until SIGTERM, and then until its calls are answered."""

import gc
import resource
import socket
import threading
from queue import SimpleQueue
from time import monotonic
from types import FrameType
from typing import Protocol

import uvicorn

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, exit_after
from producers.gateway.app import Gateway
from producers.gateway.edge.connections import Connections
from producers.gateway.edge.limited_protocol import DEFAULT_HEADERS, limited_protocol
from producers.gateway.edge.patience import Patience
from producers.gateway.memory import map_large_blocks

log = logs.get_logger(__name__)

_ANSWERS_S = 2.0
"""For the answers to those who are not waited for any longer."""
_GRACE_S = 2
_EXIT_MARGIN_S = 6.0
_FORCED_S = 5.0
"""For an end that does not wait for anything."""
_MOST_WORD_BYTES = 4_096
"""Of a message that comes over a WebSocket: nobody reads it."""
_YOUNG_OBJECTS = 20_000
"""Made before the garbage collector looks at them: those of some hundred calls, most of which are gone by then."""
_DESCRIPTORS_BESIDES = 512
"""For what is no connection of a caller: Kafka, Postgres, Redis, uploads."""


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
    signal ends it at once. The process ends also if the event loop heeds neither, or has not come so far."""

    def __init__(self, config: uvicorn.Config, gateway: Served, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain_timeout_s = drain_timeout_s
        self._signals = 0
        self._seen: SimpleQueue[bool] = SimpleQueue()
        """True for each signal; False: no more are waited for."""
        self._ends_at: float | None = None
        self._exits_at: float | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        watch = threading.Thread(target=self._end_in_time, name="signals", daemon=True)
        watch.start()
        try:
            super().run(sockets)
        finally:
            self._seen.put(False)
            watch.join()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is there by now stays. With it a full collection stopped every call for 100 ms, once in two seconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the base class's signature
        # Not noted as the base class does: it would raise the signal again in the end, and the status would not be 0.
        # A handler runs in the middle of whatever the thread was doing, which may hold any lock: it sets flags alone.
        self._signals += 1
        # Which may interrupt itself, and waits for nothing.
        self._seen.put(True)
        if self._signals > 1:
            self.should_exit = self.force_exit = True

    def _end_in_time(self) -> None:
        signals = 0
        while self._seen.get():
            signals += 1
            if signals == 1:
                # Before it has started, nobody is to be answered.
                exit_after((self._drain_timeout_s if self.started else 0.0) + _EXIT_MARGIN_S)
            elif signals == 2:
                exit_after(_FORCED_S)

    async def on_tick(self, counter: int) -> bool:
        now = monotonic()
        if self._signals and self._ends_at is None:
            self._ends_at = now + self._drain_timeout_s
            self._gateway.drain()
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
    map_large_blocks()
    settings = Settings()
    logs.configure(settings, "gateway")
    try:
        gateway = Gateway(settings)
    except ValueError as error:
        log.error("gateway_failed", reason=str(error))
        return 1
    health = HealthServer(gateway.readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    patience = Patience()
    most = _room_for(settings.gateway_max_connections)
    connections = Connections(most, min(most, settings.gateway_max_connections_per_address), patience)
    config = uvicorn.Config(
        gateway.app,
        host=settings.gateway_host,
        port=settings.gateway_port,
        loop="uvloop",
        http=limited_protocol(connections),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="websockets-sansio",
        ws_max_size=_MOST_WORD_BYTES,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=DEFAULT_HEADERS,
        proxy_headers=False,
        timeout_keep_alive=round(patience.idle_s),
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


def _room_for(connections: int) -> int:
    """So many connections, or as many as this process may have descriptors for; its limit is raised as far as that
    goes."""
    wanted = connections + _DESCRIPTORS_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, soft - _DESCRIPTORS_BESIDES)
    if room < connections:
        log.warning("few_descriptors", connections=room, wanted=connections, descriptors=soft)
    return min(room, connections)
