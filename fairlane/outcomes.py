"""The words every reply, metric, HTTP answer and document uses for what became of a request."""

from collections.abc import Mapping
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


DEFAULT_TIMEOUT_MS: Mapping[str, int] = {Priority.HIGH: 30_000, Priority.NORMAL: 60_000, Priority.LOW: 120_000}
"""How much time an online request has that does not say it."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Decision(StrEnum):
    """What the dispatcher, a consumer or an operator decided, as it stands in the audit."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    DEAD_LETTERED = "dead_lettered"
    DEGRADED = "degraded"
    DISPATCHED = "dispatched"
    HANDED_BACK = "handed_back"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    REPLAYED = "replayed"
    CACHED = "cached"


class CacheMode(StrEnum):
    """Which answers given before may answer a request: none, those to the same, or those to what means the same."""

    NONE = "none"
    EXACT = "exact"
    SEMANTIC = "semantic"


class HistoryReason(StrEnum):
    """Why a request was not given all of its conversation that it should have."""

    LATE = "late"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    BEHIND = "behind"
    """The turn that it comes after is not recorded yet."""
    NO_ROOM = "no_room"
    SHORTENED = "shortened"
    """Its older part was left out: it is longer than is kept, or than there is room for."""


class RetrievalMode(StrEnum):
    """How far retrieval looks."""

    HYBRID = "hybrid"
    VECTOR = "vector"
    CACHED = "cached"


class RetrievalReason(StrEnum):
    """Why retrieval looked less far than it was asked to, or found nothing."""

    LATE = "late"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    EMBEDDER_FAILED = "embedder_failed"
    EMBEDDER_MISMATCH = "embedder_mismatch"
    NO_SUCH_COLLECTION = "no_such_collection"
    NOT_CACHED = "not_cached"
    NOTHING_FOUND = "nothing_found"
    NO_ROOM = "no_room"


class Degradation(StrEnum):
    """What was done to a request so that it could be served at all."""

    FEWER_PASSAGES = "fewer_passages"
    VECTOR_ONLY = "vector_only"
    CACHED_ONLY = "cached_only"
    NO_RETRIEVAL = "no_retrieval"
    SHORTER_CONTEXT = "shorter_context"
    CAPPED_MAX_TOKENS = "capped_max_tokens"
    SMALLER_MODEL = "smaller_model"
    DEFERRED = "deferred"
    NO_HISTORY = "no_history"


class Health(StrEnum):
    """How an inference consumer feels."""

    HEALTHY = "healthy"
    FAILING = "failing"
