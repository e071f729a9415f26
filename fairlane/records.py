"""The records on the wire, one frozen dataclass each.

Every field here stands in the schema of the same name under ``schemas/`` and a contract test holds the two together.
Times are milliseconds since the epoch by the broker's clock (``*_at_ms``), spans are milliseconds (``*_ms``).
Codes, tasks and priorities travel as strings: a symbol added later must stay readable by yesterday's reader.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestInput:
    """What the model is given. Which fields must be set follows from the task.

    generate: ``messages`` or ``prompt``; embed: ``texts``; rank: ``query`` and ``documents``; classify: ``image``
    (raw 8-bit grey pixels, row by row).
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    texts: tuple[str, ...] | None = None
    query: str | None = None
    documents: tuple[str, ...] | None = None
    image: bytes | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters; ``temperature`` 0 is greedy decoding."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Where to look for context and how many passages to add."""

    collection: str
    top_k: int = 4


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request as a tenant publishes it. The tenant that counts is the topic's; ``tenant`` may only agree with it."""

    request_id: str
    model: str
    task: str
    input: RequestInput
    parameters: Parameters = field(default_factory=Parameters)
    priority: str = "normal"
    timeout_ms: int | None = None
    tenant: str | None = None
    reply_to: str | None = None
    retrieval: Retrieval | None = None
    conversation_id: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceCoordinate:
    """Where a record stands in the log."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage with the score it was ranked by."""

    passage_id: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A request that was admitted, on its way to one pool."""

    request: InferenceRequest
    tenant: str
    pool: str
    model_version: str
    priority_class: str
    cost_tokens: int
    submitted_at_ms: int
    admitted_at_ms: int
    dispatched_at_ms: int
    deadline_at_ms: int
    reply_topic: str
    dispatcher_id: str
    source: SourceCoordinate
    degradations: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A class label and its probability."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Output:
    """What the model answered: text for generate, one vector per text for embed, one score per document for rank
    (in the order given), labels by falling probability for classify."""

    text: str | None = None
    embeddings: tuple[tuple[float, ...], ...] | None = None
    scores: tuple[float, ...] | None = None
    labels: tuple[LabelScore, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens as the model's own tokenizer counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """When a request passed each stage, milliseconds since the epoch; None where it never got there."""

    submitted_at_ms: int | None = None
    admitted_at_ms: int | None = None
    dispatched_at_ms: int | None = None
    received_at_ms: int | None = None
    engine_started_at_ms: int | None = None
    engine_finished_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PassageReference:
    """A passage that was used, without its text."""

    passage_id: str
    score: float


@dataclass(frozen=True, slots=True)
class InferenceReply:
    """The final reply to one request."""

    request_id: str
    tenant: str
    outcome: str
    code: str | None = None
    field: str | None = None
    message: str | None = None
    retry_after_ms: int | None = None
    model: str | None = None
    model_version: str | None = None
    task: str | None = None
    engine: str | None = None
    output: Output | None = None
    finish_reason: str | None = None
    usage: TokenUsage = TokenUsage()
    timings: Timings = Timings()
    batch_size: int = 0
    degradations: tuple[str, ...] = ()
    passages: tuple[PassageReference, ...] = ()
    replayed: bool = False
    source: SourceCoordinate | None = None


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Streamed text. A new (generation, attempt) restarts the text; the final reply is authoritative."""

    request_id: str
    tenant: str
    generation: int
    attempt: int
    seq: int
    text: str
    last: bool = False


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """What one work item cost. Emitted once for every outcome of dispatched work; ``work`` is its coordinate."""

    request_id: str
    tenant: str
    pool: str
    model: str
    model_version: str
    priority_class: str
    outcome: str
    code: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_tokens: int
    engine_ms: int
    occurred_at_ms: int
    work: SourceCoordinate


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One decision about one request, with the inputs that led to it. Never contains prompt text."""

    request_id: str
    tenant: str
    decision: str
    actor: str
    occurred_at_ms: int
    source: SourceCoordinate
    code: str | None = None
    message: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Heartbeat of one inference consumer."""

    instance_id: str
    pool: str
    models: tuple[str, ...]
    health: str
    draining: bool
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    max_batch_size: int
    max_batch_tokens: int
    batch_fill: float
    in_flight_items: int
    in_flight_tokens: int
    reported_at_ms: int


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as every process sees it. None means no limit of its own; an empty ``models`` means all."""

    tenant: str
    weight: float = 1.0
    classes: tuple[str, ...] = ("high", "normal", "low")
    models: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    pool: str | None = None
    max_queue_requests: int = 10_000
    max_queue_bytes: int = 67_108_864
    requests_per_s: float | None = None
    burst_requests: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A model that a pool serves."""

    model: str
    version: str
    pool: str
    engine: str
    tasks: tuple[str, ...]
    path: str
    max_context_tokens: int
    max_output_tokens: int
    max_batch_size: int = 32
    max_batch_tokens: int = 16_384


type_by_name: dict[str, type] = {
    record.__name__: record
    for record in (
        InferenceRequest,
        WorkItem,
        InferenceReply,
        ReplyChunk,
        UsageEvent,
        AuditEvent,
        CapacityReport,
        TenantSpec,
        ModelVersion,
    )
}
"""The top-level records by the name of their schema."""
