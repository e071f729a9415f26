"""The words every reply, metric, HTTP answer and document uses for what became of a request."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. Exactly one is committed per accepted request."""

    OK = "ok"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Code(StrEnum):
    """Why a request was rejected or failed."""

    # rejected
    OVERLOADED = "overloaded"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    QUOTA_EXCEEDED = "quota_exceeded"
    UNKNOWN_MODEL = "unknown_model"
    DRAINING = "draining"
    # failed
    CONTEXT_TOO_LONG = "context_too_long"
    ENGINE_ERROR = "engine_error"
    POISON = "poison"
    RETRIES_EXHAUSTED = "retries_exhausted"


class Task(StrEnum):
    """What a model is asked to do."""

    GENERATE = "generate"
    EMBED = "embed"
    RANK = "rank"
    CLASSIFY = "classify"


class Priority(StrEnum):
    """The class a request waits in; also the last part of a priority topic's name."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


class Decision(StrEnum):
    """What the dispatcher or a consumer decided, as it stands in the audit."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    DEAD_LETTERED = "dead_lettered"
    DISPATCHED = "dispatched"
    EXPIRED = "expired"
