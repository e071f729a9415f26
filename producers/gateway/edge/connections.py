"""Connections that are open: how many there may be, and a look at each now and then."""

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any

from fairlane import metrics
from producers.gateway.edge.addresses import address_of
from producers.gateway.edge.patience import Cut, Outflow, Patience

_LEFT = (7, 8)
"""CLOSE, CLOSE_WAIT."""

Late = Callable[[float], Cut | None]


class Connections:
    """A bound of all, and one of each address. On one event loop.

    Args:
        most: connections.
        most_of_address: of those from one address, or one /64 network of IPv6.
        patience: with each of them.
    """

    def __init__(self, most: int, most_of_address: int, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._most = most
        self._most_of_address = most_of_address
        self._of_address: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def enter(self, address: str) -> Cut | None:
        """Let one in, or say why not. Whoever is let in leaves in the end."""
        if self._total >= self._most:
            return Cut.TOO_MANY
        if self._of_address[address] >= self._most_of_address:
            return Cut.TOO_MANY_OF_ADDRESS
        self._total += 1
        self._of_address[address] += 1
        metrics.GATEWAY_CONNECTIONS.set(self._total)
        return None

    def leave(self, address: str) -> None:
        """It is over."""
        self._total -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]
        metrics.GATEWAY_CONNECTIONS.set(self._total)


class Connection:
    """One of them, from when it is made until it is lost, whatever is spoken on it.

    Attributes:
        transport: to write to; what is written there is watched.
        patience: with it.
        refused: why it is not let in.
        late: says why nothing more is waited for; asked at every look.
    """

    def __init__(
        self, connections: Connections, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, late: Late
    ) -> None:
        self.transport = CountedTransport(transport)
        self.patience = connections.patience
        self.late = late
        self._connections = connections
        self._loop = loop
        self._outflow = Outflow(self.patience)
        self._address = address_of(transport.get_extra_info("peername"))
        self.refused = connections.enter(self._address)
        if self.refused is not None:
            count(self.refused)
        self._timer = loop.call_later(self.patience.look_s, self._look)

    def lost(self) -> None:
        """It is over."""
        self._timer.cancel()
        if self.refused is None:
            self._connections.leave(self._address)

    def _look(self) -> None:
        now_s, transport = self._loop.time(), self.transport
        # Also while it is being closed: that waits for what is not taken.
        if self._outflow.is_stuck(now_s, transport.written_bytes, transport.untaken_bytes()):
            count(Cut.UNTAKEN)
            transport.abort()
            return
        if not transport.is_closing() and (why := self.late(now_s)) is not None:
            count(why)
            transport.close()
        self._timer = self._loop.call_later(self.patience.look_s, self._look)


class CountedTransport(asyncio.Transport):
    """A transport that knows how much was written to it.

    Attributes:
        written_bytes: since it was made.
        lingers: asked before it is closed: whether it is read on and closed later.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self.written_bytes = 0
        self.lingers: Callable[[], bool] | None = None

    def untaken_bytes(self) -> int:
        """Of that, what the other side's system has not taken; 0 if all is with this one's, whatever became of it."""
        buffered_bytes = self._transport.get_write_buffer_size()
        if not buffered_bytes:
            return 0
        # A socket takes more only when a third of its buffer, of megabytes, is free again: for a slow reader that is
        # minutes, in which only this number moves.
        return buffered_bytes + _queued_bytes(self._transport.get_extra_info("socket"))

    def has_left(self) -> bool:
        """Whether the other side has closed the connection, though nothing is read from it."""
        return _state_of(self._transport.get_extra_info("socket")) in _LEFT

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written_bytes += len(data)
        self._transport.write(data)

    def close(self) -> None:
        if self.lingers is None or not self.lingers():
            self._transport.close()

    def write_eof(self) -> None:
        self._transport.write_eof()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


def _queued_bytes(pseudo: Any) -> int:
    """Of a socket that this system has and the other side's has not acknowledged; 0 where that cannot be asked."""
    if sys.platform != "linux" or pseudo is None:
        return 0
    try:
        return int.from_bytes(ioctl(pseudo.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # It was closed.
        return 0


def _state_of(pseudo: Any) -> int | None:
    """Of its connection, as in Linux's ``tcp_states.h``; None where that cannot be asked."""
    if sys.platform != "linux" or pseudo is None:
        return None
    try:
        # A descriptor of its own: what the event loop gives away may not be asked.
        with socket.socket(fileno=os.dup(pseudo.fileno())) as own:
            return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (OSError, ValueError):
        # It was closed.
        return None


def count(why: Cut) -> None:
    """One was cut for this reason."""
    metrics.GATEWAY_CONNECTIONS_CUT.labels(reason=why).inc()
