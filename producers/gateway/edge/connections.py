"""Limits on open connections, their timeouts and minimum rates, and a periodic check of each."""

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from fcntl import ioctl
from ipaddress import IPv4Address, IPv6Address, ip_address
from termios import TIOCOUTQ
from typing import Any, Final

from fairlane import metrics
from fairlane.settings import Network


class CloseReason(StrEnum):
    """Why a connection was not admitted, or was closed by the gateway."""

    TOO_MANY = "too_many"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    PIPELINED = "pipelined"
    """More calls were pipelined behind the one being answered than allowed."""
    UNREAD_BODY = "unread_body"
    """The call was answered, and its unread body kept coming."""
    IDLE = "idle"
    UNTAKEN = "untaken"
    """The peer did not take what was written."""


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """Bounds of one connection.

    Attributes:
        head_s: from the start of a connection, or the first byte of a head, to the end of the head; also the time for
            the rest of a body after its answer.
        idle_s: from the end of an answer to the first byte of the next head.
        span_s: in each span of this length, a body must end or arrive at ``bytes_per_s``.
        bytes_per_s: minimum rate in both directions.
        taken_span_s: in each span of this length, the peer must take all written bytes, or take them at
            ``bytes_per_s``. Longer than ``span_s``: the peer's kernel takes nothing while its buffer is full, then a
            large part of it at once.
        look_s: interval between two checks of a connection.
    """

    head_s: float = 10.0
    idle_s: float = 75.0
    span_s: float = 30.0
    bytes_per_s: int = 1_024
    taken_span_s: float = 120.0
    look_s: float = 1.0


class ReceiveStage(Enum):
    """Part of a call that the client is expected to send next."""

    HEAD = auto()
    BODY = auto()
    LEFTOVER = auto()
    """The rest of a body whose call is answered."""
    NOTHING = auto()
    """Nothing until the call is answered."""
    IDLE = auto()


class Inflow:
    """Timeouts of received data. Blank lines between calls reset no timeout, so they keep no connection open.

    Attributes:
        stage: what the client is expected to send next.
    """

    def __init__(self, timeouts: ConnectionTimeouts, now_s: float) -> None:
        self._timeouts = timeouts
        self.enter(ReceiveStage.HEAD, now_s)

    def enter(self, stage: ReceiveStage, now_s: float) -> None:
        """Start a stage and its timeout."""
        self.stage = stage
        self._since_s = now_s
        self._bytes = 0

    def take(self, body_bytes: int) -> None:
        self._bytes += body_bytes

    def late(self, now_s: float, *, is_paused: bool) -> CloseReason | None:
        """Why to stop waiting, or None. ``is_paused``: the gateway itself has paused reading."""
        waited_s, timeouts = now_s - self._since_s, self._timeouts
        if is_paused and self.stage in (ReceiveStage.HEAD, ReceiveStage.BODY):
            self.enter(self.stage, now_s)
        elif self.stage is ReceiveStage.BODY:
            if waited_s >= timeouts.span_s:
                if self._bytes < timeouts.span_s * timeouts.bytes_per_s:
                    return CloseReason.SLOW_BODY
                self.enter(ReceiveStage.BODY, now_s)
        elif self.stage is ReceiveStage.HEAD and waited_s >= timeouts.head_s:
            return CloseReason.SLOW_HEAD
        elif self.stage is ReceiveStage.LEFTOVER and waited_s >= timeouts.head_s:
            return CloseReason.UNREAD_BODY
        elif self.stage is ReceiveStage.IDLE and waited_s >= timeouts.idle_s:
            return CloseReason.IDLE
        return None


class Outflow:
    """Rate at which the peer takes written data."""

    def __init__(self, timeouts: ConnectionTimeouts) -> None:
        self._timeouts = timeouts
        self._span: tuple[float, int, int] | None = None
        """Start of the span, with the bytes taken and not taken at that time."""

    def is_stuck(self, now_s: float, written_bytes: int, untaken_bytes: int) -> bool:
        """Whether the peer takes too little, given the bytes written since the connection began and those of them that
        it has not taken."""
        taken_bytes = written_bytes - untaken_bytes
        if not untaken_bytes:
            self._span = None
        elif self._span is None:
            self._span = now_s, taken_bytes, untaken_bytes
        else:
            since_s, taken_before, owed_bytes = self._span
            timeouts = self._timeouts
            if now_s - since_s >= timeouts.taken_span_s:
                if taken_bytes - taken_before < min(owed_bytes, timeouts.taken_span_s * timeouts.bytes_per_s):
                    return True
                self._span = now_s, taken_bytes, untaken_bytes
        return False


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

    def __init__(self, most: int, most_of_address: int, timeouts: ConnectionTimeouts | None = None) -> None:
        self.timeouts = timeouts or ConnectionTimeouts()
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
        timeouts: timeouts of the connection.
        refused: why it was not admitted; None if it was.
        late: returns why to close the connection, or None; called at every check.
    """

    def __init__(
        self, connections: Connections, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, late: Late
    ) -> None:
        self.transport = CountedTransport(transport)
        self.timeouts = connections.timeouts
        self.late = late
        self._connections = connections
        self._loop = loop
        self._outflow = Outflow(self.timeouts)
        self._address = address_of(transport.get_extra_info("peername"))
        self.refused = connections.enter(self._address)
        if self.refused is not None:
            count(self.refused)
        self._timer = loop.call_later(self.timeouts.look_s, self._look)

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
        self._timer = self._loop.call_later(self.timeouts.look_s, self._look)


_UNCHANGED: Final = (
    "abort",
    "get_extra_info",
    "get_write_buffer_size",
    "is_closing",
    "pause_reading",
    "resume_reading",
    "set_protocol",
    "write_eof",
)
"""Methods of a transport that need no counting."""


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
        for name in _UNCHANGED:
            setattr(self, name, getattr(transport, name))

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
