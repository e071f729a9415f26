"""Limits on open connections, and a periodic check of each."""

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fcntl import ioctl
from ipaddress import IPv4Address, IPv6Address, ip_address
from termios import TIOCOUTQ
from typing import Any, Final

from fairlane import metrics
from fairlane.settings import Network
from producers.gateway.edge.timeouts import CloseReason, ConnectionTimeouts, Outflow

_NETWORK_BITS: Final = 64
"""Low-order bits of an IPv6 address that one customer may choose freely (RFC 6177)."""
_MOST_PROXIES: Final = 16
"""Proxies that a call may have passed: a header has room for thousands of entries."""


def address_of(peer: Any, forwarded: Sequence[bytes] = (), trusted: Sequence[Network] = ()) -> str:
    """The address shared by all connections of one caller; with IPv6 its /64 network.

    Args:
        peer: remote address as reported by a transport.
        forwarded: values of the X-Forwarded-For headers, in order.
        trusted: networks of proxies. The last entry outside them is the address that the outermost proxy saw; entries
            to the left of it come from the caller and are not trusted. Without such an entry, or if it is no address,
            the peer is the caller.
    """
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    address = _parsed(host)
    if address is None:
        return host
    if forwarded and _is_in(address, trusted):
        address = _forwarded_for(forwarded, trusted) or address
    if isinstance(address, IPv6Address):
        address = IPv6Address(int(address) >> _NETWORK_BITS << _NETWORK_BITS)
    return str(address)


def _forwarded_for(forwarded: Sequence[bytes], trusted: Sequence[Network]) -> IPv4Address | IPv6Address | None:
    # With more entries, the first element is the unsplit rest, which is no address.
    for entry in reversed(b",".join(forwarded).rsplit(b",", _MOST_PROXIES)):
        address = _parsed(entry.decode("latin-1").strip(" \t"))
        if address is None or not _is_in(address, trusted):
            return address
    return None


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _is_in(address: IPv4Address | IPv6Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


_LEFT = (7, 8)
"""CLOSE and CLOSE_WAIT: the peer has closed."""

Late = Callable[[float], CloseReason | None]


class Connections:
    """A limit on all connections, and one per address or /64 network of IPv6. For one event loop."""

    def __init__(self, most: int, most_of_address: int, patience: ConnectionTimeouts | None = None) -> None:
        self.patience = patience or ConnectionTimeouts()
        self._most = most
        self._most_of_address = most_of_address
        self._of_address: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def enter(self, address: str) -> CloseReason | None:
        """Admit a connection, or return why not. An admitted one must ``leave`` in the end."""
        if self._total >= self._most:
            return CloseReason.TOO_MANY
        if self._of_address[address] >= self._most_of_address:
            return CloseReason.TOO_MANY_OF_ADDRESS
        self._total += 1
        self._of_address[address] += 1
        metrics.GATEWAY_CONNECTIONS.set(self._total)
        return None

    def leave(self, address: str) -> None:
        """Release an admitted connection."""
        self._total -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]
        metrics.GATEWAY_CONNECTIONS.set(self._total)


class Connection:
    """One connection from accept to loss, whatever protocol it speaks.

    Attributes:
        transport: for all writes, which it counts.
        patience: timeouts of the connection.
        refused: why it was not admitted; None if it was.
        late: returns why to close the connection, or None; called at every check.
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
        """End the checks and release the connection."""
        self._timer.cancel()
        if self.refused is None:
            self._connections.leave(self._address)

    def _look(self) -> None:
        now_s, transport = self._loop.time(), self.transport
        # Also while closing, which waits until the peer has taken everything.
        if self._outflow.is_stuck(now_s, transport.written_bytes, transport.untaken_bytes()):
            count(CloseReason.UNTAKEN)
            transport.abort()
            return
        if not transport.is_closing() and (why := self.late(now_s)) is not None:
            count(why)
            transport.close()
        self._timer = self._loop.call_later(self.patience.look_s, self._look)


class CountedTransport(asyncio.Transport):
    """A transport that counts the bytes written to it.

    Attributes:
        written_bytes: since it was made.
        lingers: called before a close; True postpones the close.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self.written_bytes = 0
        self.lingers: Callable[[], bool] | None = None

    def untaken_bytes(self) -> int:
        """Written bytes that the peer's kernel has not acknowledged; 0 once the local kernel has them all."""
        buffered_bytes = self._transport.get_write_buffer_size()
        if not buffered_bytes:
            return 0
        # A socket becomes writable only when a third of its buffer of megabytes is free: minutes with a slow reader,
        # in which only the kernel's queue shrinks.
        return buffered_bytes + _queued_bytes(self._transport.get_extra_info("socket"))

    def has_left(self) -> bool:
        """Whether the peer has closed the connection; works while reading is paused."""
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
    """Bytes in the kernel's send queue that the peer has not acknowledged; 0 if that cannot be determined."""
    if sys.platform != "linux" or pseudo is None:
        return 0
    try:
        return int.from_bytes(ioctl(pseudo.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # The socket was closed.
        return 0


def _state_of(pseudo: Any) -> int | None:
    """TCP state as in Linux's ``tcp_states.h``; None if it cannot be determined."""
    if sys.platform != "linux" or pseudo is None:
        return None
    try:
        # On a duplicate descriptor: the event loop owns the socket.
        with socket.socket(fileno=os.dup(pseudo.fileno())) as own:
            return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (OSError, ValueError):
        # The socket was closed.
        return None


def count(why: CloseReason) -> None:
    """Count a connection cut for this reason."""
    metrics.GATEWAY_CONNECTIONS_CUT.labels(reason=why).inc()
