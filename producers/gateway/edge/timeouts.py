"""Timeouts and minimum rates of a connection. Pure."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto


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

    @property
    def span_bytes(self) -> float:
        """Bytes of a body that must arrive in a span."""
        return self.span_s * self.bytes_per_s

    @property
    def taken_span_bytes(self) -> float:
        """Written bytes that the peer must take in a span."""
        return self.taken_span_s * self.bytes_per_s


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

    def __init__(self, patience: ConnectionTimeouts, now_s: float) -> None:
        self._patience = patience
        self.enter(ReceiveStage.HEAD, now_s)

    def enter(self, stage: ReceiveStage, now_s: float) -> None:
        """Start a stage and its timeout."""
        self.stage = stage
        self._since_s = now_s
        self._bytes = 0

    def take(self, body_bytes: int) -> None:
        """Count received bytes of a body."""
        self._bytes += body_bytes

    def late(self, now_s: float, *, is_paused: bool) -> CloseReason | None:
        """Why to stop waiting, or None. ``is_paused``: the gateway itself has paused reading."""
        waited_s, patience = now_s - self._since_s, self._patience
        if is_paused and self.stage in (ReceiveStage.HEAD, ReceiveStage.BODY):
            self.enter(self.stage, now_s)
        elif self.stage is ReceiveStage.BODY:
            if waited_s >= patience.span_s:
                if self._bytes < patience.span_bytes:
                    return CloseReason.SLOW_BODY
                self.enter(ReceiveStage.BODY, now_s)
        elif self.stage is ReceiveStage.HEAD and waited_s >= patience.head_s:
            return CloseReason.SLOW_HEAD
        elif self.stage is ReceiveStage.LEFTOVER and waited_s >= patience.head_s:
            return CloseReason.UNREAD_BODY
        elif self.stage is ReceiveStage.IDLE and waited_s >= patience.idle_s:
            return CloseReason.IDLE
        return None


class Outflow:
    """Rate at which the peer takes written data."""

    def __init__(self, patience: ConnectionTimeouts) -> None:
        self._patience = patience
        self._span: tuple[float, int, int] | None = None
        """Start of the span, with the bytes taken and not taken at that time."""

    def is_stuck(self, now_s: float, written_bytes: int, untaken_bytes: int) -> bool:
        """Whether the peer takes too little.

        Args:
            now_s: monotonic seconds.
            written_bytes: since the connection began.
            untaken_bytes: of those, the bytes that the peer has not taken.
        """
        taken_bytes = written_bytes - untaken_bytes
        if not untaken_bytes:
            self._span = None
        elif self._span is None:
            self._span = now_s, taken_bytes, untaken_bytes
        else:
            since_s, taken_before, owed_bytes = self._span
            if now_s - since_s >= self._patience.taken_span_s:
                if taken_bytes - taken_before < min(owed_bytes, self._patience.taken_span_bytes):
                    return True
                self._span = now_s, taken_bytes, untaken_bytes
        return False
