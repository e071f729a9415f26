"""How long a connection is waited for, and how slow its two directions may be. Pure."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto


class Cut(StrEnum):
    """Why a connection was not let in, or was ended before its caller ended it."""

    TOO_MANY = "too_many"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    PIPELINED = "pipelined"
    """It sent more behind a call that is answered than may wait."""
    UNREAD_BODY = "unread_body"
    """It was answered, and went on sending what the answer did not need."""
    IDLE = "idle"
    UNTAKEN = "untaken"
    """What was written to it was not taken."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of one connection.

    Attributes:
        head_s: from the beginning of a connection, or the first byte of a head, to the end of the head; also what is
            left for the rest of a body when the answer is sent.
        idle_s: from the end of an answer to the first byte of the next head.
        span_s: in each span of so many seconds, a body must end, or
        bytes_per_s: come at this rate.
        taken_span_s: in each span of so many seconds, what is written must be taken whole, or at that rate. Longer:
            the other side's system takes it in steps, nothing while its buffer is full, then a good part of that.
        look_s: between two looks at a connection.
    """

    head_s: float = 10.0
    idle_s: float = 75.0
    span_s: float = 30.0
    bytes_per_s: int = 1_024
    taken_span_s: float = 120.0
    look_s: float = 1.0

    @property
    def span_bytes(self) -> float:
        """Of a body that must come in a span."""
        return self.span_s * self.bytes_per_s

    @property
    def taken_span_bytes(self) -> float:
        """Of what is written that must be taken in a span."""
        return self.taken_span_s * self.bytes_per_s


class Stage(Enum):
    """What is to come next from a caller."""

    HEAD = auto()
    BODY = auto()
    LEFTOVER = auto()
    """The rest of a body whose call is answered."""
    NOTHING = auto()
    """Until it is answered."""
    IDLE = auto()


class Inflow:
    """What comes in. Blank lines between two calls move nothing, so that they keep no connection open.

    Attributes:
        stage: what is to come next.
    """

    def __init__(self, patience: Patience, now_s: float) -> None:
        self._patience = patience
        self.enter(Stage.HEAD, now_s)

    def enter(self, stage: Stage, now_s: float) -> None:
        """From now on this is to come."""
        self.stage = stage
        self._since_s = now_s
        self._bytes = 0

    def take(self, body_bytes: int) -> None:
        """So much of a body came."""
        self._bytes += body_bytes

    def late(self, now_s: float, *, is_paused: bool) -> Cut | None:
        """Why it is waited for no longer. ``is_paused``: it is we who do not read on."""
        waited_s, patience = now_s - self._since_s, self._patience
        if is_paused and self.stage in (Stage.HEAD, Stage.BODY):
            self.enter(self.stage, now_s)
        elif self.stage is Stage.BODY:
            if waited_s >= patience.span_s:
                if self._bytes < patience.span_bytes:
                    return Cut.SLOW_BODY
                self.enter(Stage.BODY, now_s)
        elif self.stage is Stage.HEAD and waited_s >= patience.head_s:
            return Cut.SLOW_HEAD
        elif self.stage is Stage.LEFTOVER and waited_s >= patience.head_s:
            return Cut.UNREAD_BODY
        elif self.stage is Stage.IDLE and waited_s >= patience.idle_s:
            return Cut.IDLE
        return None


class Outflow:
    """What is written, and taken by the other side."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._span: tuple[float, int, int] | None = None
        """Since when, and how many bytes were taken and not taken then."""

    def is_stuck(self, now_s: float, written_bytes: int, untaken_bytes: int) -> bool:
        """Whether too little is taken.

        Args:
            now_s: seconds since any moment.
            written_bytes: since the connection began.
            untaken_bytes: of those, what the other side has not taken.
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
