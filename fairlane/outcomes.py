"""Codes shared by replies, metrics, HTTP answers and documents: outcomes, reasons, tasks, priorities, decisions."""

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
    INSUFFICIENT_QUOTA = "insufficient_quota"
    """A hard budget is used up."""
    BUDGET_UNKNOWN = "budget_unknown"
    """It is not known for now what was spent of a hard budget."""
    UNKNOWN_MODEL = "unknown_model"
    DRAINING = "draining"
    # rejected if a check of the input decided it, failed if one of the output did
    GUARDRAIL_BLOCKED = "guardrail_blocked"
    GUARDRAIL_UNAVAILABLE = "guardrail_unavailable"
    # failed
    CONTEXT_TOO_LONG = "context_too_long"
    FORMAT_NOT_MET = "format_not_met"
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
    """Priority class of a request; also the last part of a priority topic's name."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


DEFAULT_TIMEOUT_MS: Mapping[str, int] = {Priority.HIGH: 30_000, Priority.NORMAL: 60_000, Priority.LOW: 120_000}
"""Timeout of an online request that sets none."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    CONTENT_FILTER = "content_filter"
    """A guardrail, or the format that a policy asks for, withheld the answer."""


class Decision(StrEnum):
    """Decision of the dispatcher, a consumer or an operator, as recorded in the audit."""

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
    GUARDED = "guarded"
    """A guardrail did more than pass."""
    CANCEL_REFUSED = "cancel_refused"
    FEEDBACK_REFUSED = "feedback_refused"
    """The record was invalid. It decides nothing about the request that it names, which may not exist."""


class GuardrailStage(StrEnum):
    """When a check is made: of the input before a model sees it, or of the output."""

    INPUT = "input"
    OUTPUT = "output"


class GuardrailCheck(StrEnum):
    """What a check looks for."""

    PII = "pii"
    SECRETS = "secrets"
    PATTERNS = "patterns"
    """The tenant's own patterns and denied words."""
    PROMPT_INJECTION = "prompt_injection"
    TOXICITY = "toxicity"
    LEAKED_PROMPT = "leaked_prompt"
    """Text of the system prompt."""
    REPETITION = "repetition"
    POST_PROCESSING = "post_processing"
    """No rule has it: it changes an answer after its checks, in a process as theirs."""


class GuardrailAction(StrEnum):
    """What follows from a finding."""

    OFF = "off"
    LOG = "log"
    """Note it, and change nothing."""
    REDACT = "redact"
    """Replace what was found by the name of its type."""
    BLOCK = "block"


class GuardrailFailure(StrEnum):
    """What becomes of a request whose check cannot be carried out: it goes on, or is refused."""

    OPEN = "open"
    CLOSED = "closed"


class GuardrailResult(StrEnum):
    """What a check decided about a request."""

    PASSED = "passed"
    LOGGED = "logged"
    REDACTED = "redacted"
    CHANGED = "changed"
    """By post-processing."""
    BLOCKED = "blocked"
    FAILED_OPEN = "failed_open"
    FAILED_CLOSED = "failed_closed"


class BudgetPeriod(StrEnum):
    """Time after which a budget begins anew, in UTC."""

    DAY = "day"
    MONTH = "month"


class BudgetScope(StrEnum):
    """Whose spending a budget limits: of all callers together, or of each by itself."""

    TENANT = "tenant"
    EACH_KEY = "each_key"
    EACH_USER = "each_user"


class Thumb(StrEnum):
    """A verdict on an output without degrees."""

    UP = "up"
    DOWN = "down"


class EvaluationConsent(StrEnum):
    """Consent of a tenant: its requests and outputs may, or may not, be used to judge and train models."""

    ALLOWED = "allowed"
    DENIED = "denied"


class CacheMode(StrEnum):
    """Which earlier answers may be reused: none, those to an equal request, or those to one with the same meaning."""

    NONE = "none"
    EXACT = "exact"
    SEMANTIC = "semantic"


class HistoryReason(StrEnum):
    """Why a request did not get the whole history of its conversation."""

    LATE = "late"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    BEHIND = "behind"
    """The turn that it follows is not recorded yet."""
    NO_ROOM = "no_room"
    SHORTENED = "shortened"
    """Older turns were left out: the history is longer than the store returns or the prompt has room for."""


class RetrievalMode(StrEnum):
    """Extent of retrieval: vectors and full text, vectors only, or earlier results only."""

    HYBRID = "hybrid"
    VECTOR = "vector"
    CACHED = "cached"


class RetrievalReason(StrEnum):
    """Why retrieval did less than requested, or found nothing."""

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
    """What was reduced so that a request could be served at all."""

    FEWER_PASSAGES = "fewer_passages"
    SHORTER_RETRIEVAL = "shorter_retrieval"
    VECTOR_ONLY = "vector_only"
    CACHED_ONLY = "cached_only"
    NO_RETRIEVAL = "no_retrieval"
    SHORTER_CONTEXT = "shorter_context"
    CAPPED_MAX_TOKENS = "capped_max_tokens"
    SMALLER_MODEL = "smaller_model"
    LOWER_CLASS = "lower_class"
    DEFERRED = "deferred"
    NO_HISTORY = "no_history"


class VersionState(StrEnum):
    """Why an inference consumer does not serve a version that it should."""

    LOADING = "loading"
    WAITING = "waiting"
    """For its turn among the consumers of its pool to give up other versions for it."""
    CHANGING = "changing"
    """It gave up other versions, and loads this one in their place."""
    NO_ROOM = "no_room"
    FAILED = "failed"


class Health(StrEnum):
    """State of an inference consumer."""

    HEALTHY = "healthy"
    FAILING = "failing"
