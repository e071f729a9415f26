"""Serve an application over HTTP until SIGTERM, then until its calls are answered."""

import asyncio
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.processes.garbage_collection import collect_less_often
from fairlane_server.processes.service import HealthServer, Readiness, exit_after
from producers.gateway.edge.connections import Connections, ConnectionTimeouts
from producers.gateway.edge.limited_protocol import DEFAULT_HEADERS, LimitedProtocol

log = logs.get_logger(__name__)

_LAST_CALLS_S = 2.0
"""How long a draining instance serves what comes over open connections: a balancer uses those that it has until it
finds the port closed."""
_ANSWERS_S = 2.0
"""For answering the calls that still wait when the drain ends."""
_CLOSE = (b"connection", b"close")
_GRACE_S = 2
_EXIT_MARGIN_S = 6.0
_FORCED_S = 5.0
"""Bound of a forced end, which waits for nothing."""
_MOST_WORD_BYTES = 4_096
"""Bound of an incoming WebSocket message; its content is ignored."""
_DESCRIPTORS_BESIDES = 512
"""File descriptors besides client connections: Kafka, Postgres, Redis, uploads."""


class Served(Protocol):
    """An application and its end. The methods are called on the event loop.

    Attributes:
        failure: the fatal error, once there is one.
    """

    app: FastAPI
    failure: BaseException | None

    @property
    def open_calls(self) -> int:
        """Number of calls in progress."""

    def drain(self) -> None:
        """Report unready."""

    def refuse(self) -> None:
        """Drain, and reject new calls."""

    def end_waiting(self) -> None:
        """Refuse, and answer every waiting call."""


class GatewayServer(uvicorn.Server):
    """Uvicorn server with a graceful drain.

    The first signal closes the port. Calls under way go on, and each open connection is closed by its next answer: a
    call may be on its way over it. After ``_LAST_CALLS_S`` idle connections are closed, further calls get 503, and the
    server ends when no call is left. After ``drain_timeout_s``, or when the gateway fails, the remaining calls are
    answered that their requests go on. A second signal ends the server at once. A watching thread ends the process if
    the event loop does not react, or has not started."""

    def __init__(self, config: uvicorn.Config, gateway: Served, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain_timeout_s = drain_timeout_s
        self._signals = 0
        self._seen: SimpleQueue[bool] = SimpleQueue()
        """True for each signal; False ends the watching thread."""
        self._refuses_at: float | None = None
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
        collect_less_often()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the base class's signature
        # Not recorded as the base class does: it would raise the signal again in the end, and the status would not be
        # 0. A handler interrupts the thread at any point, with any lock held: it only sets flags.
        self._signals += 1
        # ``SimpleQueue.put`` is reentrant and does not block.
        self._seen.put(True)
        if self._signals > 1:
            self.should_exit = self.force_exit = True

    def _end_in_time(self) -> None:
        signals = 0
        while self._seen.get():
            signals += 1
            if signals == 1:
                # Before startup has ended, no call needs an answer.
                exit_after((self._drain_timeout_s if self.started else 0.0) + _EXIT_MARGIN_S)
            elif signals == 2:
                exit_after(_FORCED_S)

    async def on_tick(self, counter: int) -> bool:
        now = monotonic()
        if self._signals and self._ends_at is None:
            self._ends_at = now + self._drain_timeout_s
            self._refuses_at = min(now + _LAST_CALLS_S, self._ends_at)
            self._gateway.drain()
            if self.started:
                await self._take_last_calls()
        if self._ends_at is None and self._gateway.failure is not None:
            self._ends_at = now
        if self._ends_at is not None:
            is_late = self._gateway.failure is not None or now > self._ends_at
            if is_late and self._exits_at is None:
                self._exits_at = now + _ANSWERS_S
                self._refuses_at = None
                self._gateway.end_waiting()
            if self._refuses_at is not None and (now >= self._refuses_at or not self.server_state.connections):
                self._refuses_at = None
                self._refuse()
            is_done = self._refuses_at is None and not self._gateway.open_calls
            if is_done or (self._exits_at is not None and now > self._exits_at):
                self.should_exit = True
        return await super().on_tick(counter)

    async def _take_last_calls(self) -> None:
        """Close the port, and every open connection with its next answer."""
        # Uvicorn makes the headers of later answers from the first list, once a second.
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        for connection in self.server_state.connections:
            if isinstance(connection, HttpToolsProtocol) and _is_unanswered(connection):
                connection.cycle.keep_alive = False
        # Closing a socket resets the connections in its queue, whose callers may have sent their calls. So each queue
        # is emptied, through a second descriptor, right before that closes the socket.
        kept = [socket.socket(fileno=os.dup(each.fileno())) for server in self.servers for each in server.sockets]
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        protocol = partial(  # type: ignore[call-arg]  # as uvicorn calls it
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listener in kept:
            with listener:
                waiting = list(_waiting(listener))
            for each in waiting:
                # Raised for one that was given up meanwhile.
                with suppress(OSError):
                    await loop.connect_accepted_socket(protocol, each)

    def _refuse(self) -> None:
        """Refuse new calls, and close connections without one."""
        self._gateway.refuse()
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpToolsProtocol):
                connection.shutdown()


def _is_unanswered(connection: HttpToolsProtocol) -> bool:
    """Whether the headers of its latest call's answer have yet to be sent."""
    # None before the first call.
    return connection.cycle is not None and not connection.cycle.response_started  # type: ignore[redundant-expr]  # as above


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections in a listening socket's queue."""
    listener.setblocking(False)
    with suppress(OSError):
        while True:
            yield listener.accept()[0]


def serve(
    served: Served, readiness: Readiness, settings: Settings, address: tuple[str, int], listener: socket.socket | None
) -> int:
    """Serve an application at an address, or on a socket that listens already. Returns the exit status: 0 after a stop
    signal, 1 after a failure."""
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    timeouts = ConnectionTimeouts()
    most = _room_for(settings.gateway_max_connections)
    connections = Connections(most, min(most, settings.gateway_max_connections_per_address), timeouts)
    config = uvicorn.Config(
        served.app,
        host=address[0],
        port=address[1],
        loop="uvloop",
        http=partial(LimitedProtocol, connections),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="websockets-sansio",
        ws_max_size=_MOST_WORD_BYTES,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=DEFAULT_HEADERS,
        proxy_headers=False,
        timeout_keep_alive=round(timeouts.idle_s),
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = GatewayServer(config, served, settings.drain_timeout_s)
    try:
        server.run(None if listener is None else [listener])
    except SystemExit:
        # Raised by uvicorn when startup fails; the reason is in the log.
        return 1
    finally:
        health.stop()
    return 0 if served.failure is None and server.started else 1


def _room_for(connections: int) -> int:
    """``connections``, or fewer if the descriptor limit is lower; raises the soft limit as far as the hard limit."""
    wanted = connections + _DESCRIPTORS_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, soft - _DESCRIPTORS_BESIDES)
    if room < connections:
        log.warning("few_descriptors", connections=room, wanted=connections, descriptors=soft)
    return min(room, connections)
