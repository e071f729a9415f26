"""Records on the wire, one frozen dataclass each.

Every field is in the schema of the same name under ``schemas/``; a contract test compares the two. Times are
milliseconds since the epoch by the broker's clock (``*_at_ms``), durations are milliseconds (``*_ms``). Codes, tasks
and priorities are strings: an older reader must be able to read a symbol that was added later.
"""

from dataclasses import field

from fairlane.evaluation_records import EvaluationMark, Shadow
from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailPolicy, GuardrailVerdict
from fairlane.money import nanos_text
from fairlane.rollout_records import Rollout

MOST_INPUT_ITEMS = 4_096
"""Most texts, documents or messages of one request, whatever a deployment allows; no engine takes more."""


@frozen_dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


@frozen_dataclass(frozen=True, slots=True)
class RequestInput:
    """Input of the model. The task decides which fields must be set.

    generate: ``messages`` or ``prompt``; embed: ``texts``; rank: ``query`` and ``documents``; classify: ``image`` (a
    PNG, JPEG or WebP file, or raw 8-bit grey pixels of the model's size, row by row).
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    texts: tuple[str, ...] | None = None
    query: str | None = None
    documents: tuple[str, ...] | None = None
    image: bytes | None = None


@frozen_dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters; ``temperature`` 0 is greedy decoding. ``logprobs`` is the number of alternatives to report
    at each position, 0 to 20; None reports no log probabilities."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    logprobs: int | None = None


@frozen_dataclass(frozen=True, slots=True)
class Retrieval:
    """Collection to search for context, number of passages to add, and extent of the search: ``mode`` is hybrid, vector
    (no full text) or cached (earlier results only)."""

    collection: str
    top_k: int = 4
    mode: str = "hybrid"


@frozen_dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request as a tenant publishes it. The topic determines the tenant; ``tenant`` may only agree with it.

    ``group`` names one of the tenant's own groups, which share its weight. ``replay_of`` is the id of the dead-lettered
    request that this one replays. ``cache`` says which earlier answers may be reused (none, exact or semantic); None
    means the tenant's default. With ``conversation_id`` the input holds the new messages, and earlier turns are added;
    ``conversation_after`` is the id of the turn that must be among them. ``requested_by`` is ``key:`` and the id of the
    API key, or ``user:`` and the subject of the token, with which the gateway was called; a tenant's own programs may
    write anything there.
    """

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
    group: str | None = None
    replay_of: str | None = None
    cache: str | None = None
    conversation_after: str | None = None
    requested_by: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class CancelRequest:
    """A tenant cancels one of its requests, on the topic of the request. The topic determines the tenant; ``tenant``
    may only agree with it."""

    request_id: str
    tenant: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a tenant on the output of one of its requests, on the topic of the request. The topic determines the
    tenant; ``tenant`` may only agree with it. ``thumb`` is up or down, ``score`` is from 0 to 1; there is at most one
    of them. ``correction`` is the text, or the label, that the output should have been. ``given_by`` is an opaque name:
    of two records of the same giver about a request the later counts. ``given_at_ms`` is set by the dispatcher."""

    request_id: str
    tenant: str | None = None
    thumb: str | None = None
    score: float | None = None
    correction: str | None = None
    tags: tuple[str, ...] = ()
    comment: str | None = None
    given_by: str | None = None
    given_at_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class SourceCoordinate:
    """Position of a record in the log."""

    topic: str
    partition: int
    offset: int


@frozen_dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage with its ranking score."""

    passage_id: str
    text: str
    score: float


@frozen_dataclass(frozen=True, slots=True)
class RetrievalUse:
    """How a request's passages were found. ``mode`` is the actual extent of the search, ``none`` when it found nothing;
    ``reason`` says why it was less than requested, None when it was not."""

    collection: str
    mode: str
    reason: str | None = None
    collection_version: int | None = None
    took_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class HistoryUse:
    """Part of its conversation that a request was given: number of messages, and why messages are missing; None when it
    got all."""

    messages: int = 0
    reason: str | None = None
    took_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class BudgetNotice:
    """A budget that a request has reached: soft, and it was served, or hard, and it was refused.

    ``of`` is tenant, each_key, each_user, or the name of one caller; ``caller`` is the one it was about, None for the
    tenant. Amounts are in billionths of one unit of the currency, as known at admission: ``spent_nanos`` is what is in
    the ledger, ``reserved_nanos`` what was admitted and is not done. ``limit_nanos`` begins anew at ``renews_at_ms``.
    """

    limit: str
    of: str
    period: str
    currency: str
    limit_nanos: int
    spent_nanos: int
    reserved_nanos: int
    renews_at_ms: int
    caller: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class WorkItem:
    """An admitted request on its way to one pool.

    ``cost_tokens`` is prompt plus twice the expected output, ``prompt_tokens`` the prompt's part of it, both estimated.
    ``handed_back`` counts the times a consumer requeued it, ``unserved`` is that number as of the last time that it was
    because the consumer had not loaded its version. ``max_prompt_tokens`` is the tenant's own bound, which the engine
    checks with the model's tokenizer; None means the model's bound alone. ``history`` holds the earlier turns of the
    conversation, oldest first. ``cache_answer`` asks for the answer to be cached for equal requests. ``budget`` is a
    soft budget that is reached. ``guardrails`` is the tenant's policy at admission; None means that nothing is checked.
    ``arm`` is the arm of the model's route, or the alias, that the version was chosen by, or ``version`` if the request
    named it itself; None from older dispatchers. ``evaluation`` marks a copy that runs for evaluation alone.
    """

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
    prompt_tokens: int = 0
    handed_back: int = 0
    max_prompt_tokens: int | None = None
    retrieval_use: RetrievalUse | None = None
    history: tuple[Message, ...] = ()
    history_use: HistoryUse | None = None
    cache_answer: bool = False
    budget: BudgetNotice | None = None
    guardrails: GuardrailPolicy | None = None
    arm: str | None = None
    unserved: int = 0
    evaluation: EvaluationMark | None = None


@frozen_dataclass(frozen=True, slots=True)
class LabelScore:
    """A class label and its probability."""

    label: str
    score: float


@frozen_dataclass(frozen=True, slots=True)
class TopLogprob:
    """A candidate token at a position, and its natural log probability there."""

    token: str
    logprob: float


@frozen_dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, its natural log probability, and the likeliest tokens at its position, likeliest first."""

    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@frozen_dataclass(frozen=True, slots=True)
class Output:
    """Output of the model: text for generate, one vector per text for embed, one score per document for rank (in the
    order given), labels by falling probability for classify. ``logprobs`` has one entry per token of the text, in
    order; None unless requested."""

    text: str | None = None
    embeddings: tuple[tuple[float, ...], ...] | None = None
    scores: tuple[float, ...] | None = None
    labels: tuple[LabelScore, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@frozen_dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens as counted by the model's own tokenizer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@frozen_dataclass(frozen=True, slots=True)
class Cost:
    """Price of what a request used: billionths of one unit of a currency (ISO 4217)."""

    nanos: int
    currency: str

    @property
    def amount(self) -> str:
        """In units of the currency, exactly: ``0.0001536``."""
        return nanos_text(self.nanos)


@frozen_dataclass(frozen=True, slots=True)
class Timings:
    """When a request passed each stage, milliseconds since the epoch; None for a stage it did not reach."""

    submitted_at_ms: int | None = None
    admitted_at_ms: int | None = None
    dispatched_at_ms: int | None = None
    received_at_ms: int | None = None
    engine_started_at_ms: int | None = None
    engine_finished_at_ms: int | None = None


@frozen_dataclass(frozen=True, slots=True)
class PassageReference:
    """A passage that was used, without its text."""

    passage_id: str
    score: float


@frozen_dataclass(frozen=True, slots=True)
class CacheUse:
    """The earlier answer that a request was given: that of ``request_id``, a request of the same tenant, answered at
    ``answered_at_ms``. ``similarity`` is the cosine of the two questions, 1 for equal ones."""

    mode: str
    request_id: str
    answered_at_ms: int
    similarity: float = 1.0


@frozen_dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What a request added to its conversation; with the reply's output it is the context of the next turn."""

    conversation_id: str
    messages: tuple[Message, ...]


@frozen_dataclass(frozen=True, slots=True)
class InferenceReply:
    """The final reply to one request.

    ``replay_of`` is copied from the request. ``attempts`` counts the engine runs that included the item; it is also 1
    when none ran, and from older consumers. With ``cache_use`` the output, its usage and its passages are those of an
    earlier answer. ``turn`` is set when the reply continues a conversation. ``cost`` is None where no price is known; a
    copy (``replayed``) repeats it, and costs nothing more. ``budget`` is the soft budget that was reached, or the hard
    one that the request was refused for. ``guardrails`` has one entry for each check made, in order. ``arm`` and
    ``evaluation`` are those of its work.
    """

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
    replay_of: str | None = None
    attempts: int = 1
    retrieval_use: RetrievalUse | None = None
    cache_use: CacheUse | None = None
    history_use: HistoryUse | None = None
    turn: ConversationTurn | None = None
    cost: Cost | None = None
    budget: BudgetNotice | None = None
    guardrails: tuple[GuardrailVerdict, ...] = ()
    arm: str | None = None
    evaluation: EvaluationMark | None = None


@frozen_dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Streamed text. A new (generation, attempt) restarts the text; the final reply is authoritative."""

    request_id: str
    tenant: str
    generation: int
    attempt: int
    seq: int
    text: str
    last: bool = False


@frozen_dataclass(frozen=True, slots=True)
class UsageEvent:
    """Cost of one work item. Emitted once for every outcome of dispatched work; ``work`` is its coordinate.

    With ``cached`` an earlier answer was reused: nothing ran, ``work`` is the position of the request, and the tokens
    are those of the answer. ``cost`` follows from the other fields and the prices that were published when the event
    was written; None where no price was known. ``batch_size`` items shared ``engine_ms``; 0 when none ran, and 1 from
    older writers. ``images`` counts those that a model looked at. ``requested_by`` is copied from the request.
    """

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
    cached: bool = False
    images: int = 0
    batch_size: int = 1
    cost: Cost | None = None
    requested_by: str | None = None


@frozen_dataclass(frozen=True, slots=True)
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


@frozen_dataclass(frozen=True, slots=True)
class VersionChange:
    """A version, ``model/version``, that a consumer should serve and does not. ``state`` is one of
    ``VersionState``; ``reason`` says why it failed."""

    version: str
    state: str
    reason: str = ""


@frozen_dataclass(frozen=True, slots=True)
class CapacityReport:
    """Heartbeat of one inference consumer.

    Rates are tokens per second of engine time, averaged over recent runs at the batch size with the highest rate; 0
    before the first run. ``cost_tokens_per_s`` is in the dispatcher's unit of cost. ``partitions`` are the partition
    numbers that this member owns, the same in all topics of its pool; empty from older consumers. ``versions`` are the
    loaded ones, each ``model/version``; from a consumer that does not follow ``control.models``, empty means unknown.
    ``changes`` are those that it should serve and does not.
    """

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
    cost_tokens_per_s: float = 0.0
    partitions: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    follows_models: bool = False
    changes: tuple[VersionChange, ...] = ()


@frozen_dataclass(frozen=True, slots=True)
class ClassLoad:
    """Backlog of one class at one dispatcher. ``backlogged_weight`` sums the weights of the tenants with waiting
    requests."""

    priority_class: str
    backlogged_weight: float
    waiting_requests: int
    waiting_tokens: int


@frozen_dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool as one dispatcher sees it: the window of the whole pool, this dispatcher's share of it (0 to 1), and its
    own work in flight. ``served_tokens`` is the cost of its work for all tenants since the dispatcher's start; 0 from
    older dispatchers."""

    pool: str
    window_tokens: int
    share: float
    in_flight_tokens: int
    classes: tuple[ClassLoad, ...] = ()
    served_tokens: int = 0


@frozen_dataclass(frozen=True, slots=True)
class ShedCount:
    """Number of requests refused with a code."""

    code: str
    requests: int


@frozen_dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant in one pool at one dispatcher. ``in_flight_tokens`` is what this dispatcher dispatched.
    ``served_tokens`` and ``shed`` count from the dispatcher's start, or from its first request of the tenant after an
    idle minute; ``wait_p99_ms`` covers the last minute, 0 without a dispatch. ``entitled_share`` is the tenant's part
    of the pool while all backlogged tenants stay backlogged."""

    tenant: str
    pool: str
    waiting_requests: int
    waiting_tokens: int
    in_flight_tokens: int
    served_tokens: int
    entitled_share: float
    wait_p99_ms: float
    shed: tuple[ShedCount, ...] = ()


@frozen_dataclass(frozen=True, slots=True)
class BudgetLoad:
    """What one dispatcher has reserved of a tenant's budgets, and of one caller's with ``caller``: of requests in its
    queue, and of the work in flight of all dispatchers."""

    tenant: str
    queued_nanos: int
    in_flight_nanos: int
    caller: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class DispatchReport:
    """Heartbeat of one dispatcher. ``tenants`` holds the busiest tenants, ``budgets`` the largest reservations; both
    are empty in most reports."""

    instance_id: str
    started_at_ms: int
    reported_at_ms: int
    draining: bool
    pools: tuple[PoolLoad, ...] = ()
    tenants: tuple[TenantLoad, ...] = ()
    budgets: tuple[BudgetLoad, ...] = ()


@frozen_dataclass(frozen=True, slots=True)
class Cancellation:
    """A dispatcher tells the consumers that a request which it dispatched is cancelled. ``requested_at_ms`` is when the
    broker received the tenant's cancellation."""

    request_id: str
    tenant: str
    dispatcher_id: str
    requested_at_ms: int


@frozen_dataclass(frozen=True, slots=True)
class TenantGroup:
    """A group of a tenant that shares the tenant's weight, or that of its ``parent`` group."""

    group: str
    weight: float = 1.0
    parent: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Longest time in the queue at which requests of a tenant's class are admitted."""

    priority_class: str
    target_ms: int


@frozen_dataclass(frozen=True, slots=True)
class Budget:
    """The most that may be spent in each day or month (``period``, in UTC), in billionths of one unit of the currency.

    ``of`` is tenant (all its requests together), each_key or each_user (each by itself), or one caller, as requests
    name it. From ``soft_nanos`` on requests are served with a notice, and reduced with ``degrade``; beyond
    ``hard_nanos`` they are refused.
    """

    of: str
    period: str
    currency: str
    soft_nanos: int | None = None
    hard_nanos: int | None = None
    degrade: bool = False


@frozen_dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as all processes see it. None means no limit of its own; an empty ``models`` means all.
    ``max_prompt_tokens`` and ``max_completion_tokens`` bound a single request. ``cache`` applies to requests that set
    none. A class that is not in ``latency_targets`` has the deployment's target. Without ``guardrails`` nothing is
    checked. ``managed_by`` is ``file`` for a tenant of the tenants file and ``api`` for one of the admin API.
    ``evaluation`` says whether its requests and outputs may be used to judge and train models: allowed or denied."""

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
    groups: tuple[TenantGroup, ...] = ()
    forbidden_degradations: tuple[str, ...] = ()
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache: str = "none"
    latency_targets: tuple[LatencyTarget, ...] = ()
    budgets: tuple[Budget, ...] = ()
    guardrails: GuardrailPolicy | None = None
    managed_by: str = "file"
    evaluation: str = "denied"


@frozen_dataclass(frozen=True, slots=True)
class ModelMetric:
    """A figure that a version was registered with."""

    name: str
    value: float


@frozen_dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model, served by a pool and by the dedicated pools of single tenants. ``smaller_model`` may
    answer in its place when it is too busy.

    ``dtype`` is float32, bfloat16 or float16; None means the engine's default. ``quantization`` is int8 for torch
    engines and one of vLLM's methods for vLLM; ``tensor_parallel_size`` is the number of devices per copy.

    ``artifact_digest`` is ``sha256:`` and the digest of its files, ``source`` the address they came from,
    ``signature`` its inputs and outputs as JSON. A version registered by models.yaml alone has none of these.
    """

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
    dedicated_pools: tuple[str, ...] = ()
    smaller_model: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int = 1
    artifact_digest: str | None = None
    source: str | None = None
    metrics: tuple[ModelMetric, ...] = ()
    signature: str | None = None
    requirements: tuple[str, ...] = ()
    registered_at_ms: int = 0
    registered_by: str | None = None
    managed_by: str = "file"


@frozen_dataclass(frozen=True, slots=True)
class RouteArm:
    """A part of the traffic and the version that gets it. ``target`` is a version, or ``@`` and an alias."""

    arm: str
    target: str
    percent: float


@frozen_dataclass(frozen=True, slots=True)
class RouteRule:
    """The arms for requests that meet all conditions; an empty condition is met by all.

    ``callers`` are values of ``requested_by``. The rule holds from ``from_ms`` until before ``until_ms``.
    ``sticky_by`` says what stays on one arm: conversation, caller or request; a request without a conversation or
    caller counts by itself.
    """

    rule: str
    arms: tuple[RouteArm, ...]
    tenants: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    from_ms: int | None = None
    until_ms: int | None = None
    sticky_by: str = "conversation"


@frozen_dataclass(frozen=True, slots=True)
class ModelRoute:
    """Which versions of a model get its requests: its aliases, and rules of which the first that is met counts.
    Requests that meet none are divided by the rollout, if one is under way, else they go to the alias ``champion``.

    ``aliases`` maps each alias to a version, and ``previous`` those that were moved to the one before. ``stopped``
    versions get nothing: waiting requests of theirs are routed again. ``revision`` counts the changes of the route.
    ``shadow`` copies a sample of the requests to a candidate, which answers nobody.
    """

    model: str
    revision: int
    aliases: dict[str, str]
    previous: dict[str, str]
    rules: tuple[RouteRule, ...] = ()
    stopped: tuple[str, ...] = ()
    changed_at_ms: int = 0
    changed_by: str = ""
    reason: str = ""
    managed_by: str = "file"
    rollout: Rollout | None = None
    shadow: Shadow | None = None


@frozen_dataclass(frozen=True, slots=True)
class Price:
    """Prices of a model in force from a time on, in billionths of the currency's unit: of a million tokens by kind, of
    a second of an engine, of an image, and of an answer from the cache. ``version`` None: of every version that has no
    price of its own then."""

    from_ms: int
    version: str | None = None
    input_nanos: int = 0
    cached_input_nanos: int = 0
    output_nanos: int = 0
    engine_second_nanos: int = 0
    image_nanos: int = 0
    cached_answer_nanos: int = 0


@frozen_dataclass(frozen=True, slots=True)
class ModelPrices:
    """All prices of a model, past and to come, in one currency (ISO 4217)."""

    model: str
    currency: str
    prices: tuple[Price, ...]


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
        DispatchReport,
        TenantSpec,
        ModelVersion,
        CancelRequest,
        Feedback,
        Cancellation,
        ModelPrices,
        ModelRoute,
    )
}
"""The top-level records by the names of their schemas."""
