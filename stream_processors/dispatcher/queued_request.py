"""Values of the pipeline: a record as read, a valid request with the decisions made so far, a cancel."""

from fairlane.codec import DecodeError
from fairlane.evaluation_records import EvaluationMark
from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailPolicy
from fairlane.outcomes import CacheMode
from fairlane.ownership import Claim, PartitionId
from fairlane.records import (
    BudgetNotice,
    HistoryUse,
    InferenceRequest,
    Message,
    ModelVersion,
    Passage,
    RetrievalUse,
    SourceCoordinate,
)
from fairlane.trace_context import TraceHeaders
from fairlane_server.models.routes import version_key
from stream_processors.dispatcher.reading.record_batches import memory_bytes
from stream_processors.dispatcher.scheduling.cost import most_output_tokens


@frozen_dataclass(frozen=True, slots=True)
class ReceivedRecord:
    """A record as read from a request, backfill or requeue topic."""

    partition: PartitionId
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    problem: DecodeError | None = None
    """Why the record could not be read, if so; ``value`` then holds the bytes that could be kept."""
    read_bytes: int = 0
    """Bytes read or decompressed to find that out."""

    @property
    def content_bytes(self) -> int:
        contents = sum(len(name) + len(content or b"") for name, content in self.headers)
        return len(self.key or b"") + len(self.value or b"") + contents

    @property
    def size_bytes(self) -> int:
        return memory_bytes(len(self.value or b"") + len(self.key or b""), self.headers)

    @property
    def cost_bytes(self) -> int:
        """Memory used by the record or bytes read for it, whichever is more."""
        return max(self.size_bytes, self.read_bytes)

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)


@frozen_dataclass(frozen=True, slots=True, eq=False)
class QueuedRequest:
    """A valid request, before and after admission.

    ``claim`` is of the record it settles, ``source`` the coordinate of the original request; they differ for requeued
    work. ``cost_tokens`` is the estimated prompt plus twice the expected output. ``quota_tokens`` is ``cost_tokens`` at
    arrival, which is charged to the quota; 0 for requeued work.
    """

    claim: Claim
    source: SourceCoordinate
    tenant: str
    request: InferenceRequest
    model: ModelVersion
    pool: str
    reply_topic: str
    cost_tokens: int
    prompt_tokens: int
    input_bytes: int
    size_bytes: int
    submitted_at_ms: int
    admitted_at_ms: int
    deadline_at_ms: int
    latency_target_ms: int
    """Longest predicted time in the queue at which it is admitted."""
    cautious_cost_tokens: int
    """``cost_tokens`` with an answer that nine of ten such requests do not exceed."""
    is_backfill: bool = False
    degradations: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    retrieval_use: RetrievalUse | None = None
    """How its passages were retrieved; None before retrieval."""
    history: tuple[Message, ...] = ()
    history_use: HistoryUse | None = None
    """How its conversation history was read; None before that."""
    cache: str = CacheMode.NONE
    """The cache mode: which cached answers may answer it, and, unless NONE, that its own answer is stored."""
    handed_back: int = 0
    unserved: int = 0
    """As in ``WorkItem``; equal to ``handed_back``: the last time was because its version was not loaded."""
    quota_tokens: int = 0
    expected_tokens: int = 0
    """The part of ``prompt_tokens`` expected from enrichment."""
    budget: BudgetNotice | None = None
    """The soft budget that it has reached, or the hard one that it is refused for."""
    arm: str | None = None
    """By which its version was chosen; as in ``WorkItem``."""
    evaluation: EvaluationMark | None = None
    """Set for a copy that runs for evaluation."""
    trace_headers: TraceHeaders = ()
    max_prompt_tokens: int | None = None
    """The tenant's bound, enforced by the consumer with the model's tokenizer."""
    guardrails: GuardrailPolicy | None = None
    """The tenant's checks at admission, which stay those of this request; None if nothing is checked."""
    encoded: tuple[InferenceRequest, bytes] | None = None
    """A request and the Avro body it was decoded from; reused for encoding while it is the same object as
    ``request``."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def settles(self) -> SourceCoordinate:
        """Coordinate of the record it settles, under which its work and its reservations are known."""
        return self.claim.coordinate

    @property
    def seen(self) -> tuple[str, str, SourceCoordinate]:
        """Its entry in the duplicate index: tenant, request id, source."""
        return self.tenant, self.request.request_id, self.source

    @property
    def owner(self) -> str:
        """The tenant whose request it is; of a copy, that of the original."""
        return self.tenant if self.evaluation is None else self.evaluation.tenant

    @property
    def group(self) -> str:
        return self.request.group or ""

    @property
    def priority_class(self) -> str:
        return self.request.priority

    @property
    def model_name(self) -> str:
        return self.model.model

    @property
    def version_key(self) -> str:
        return version_key(self.model.model, self.model.version)

    @property
    def most_output_tokens(self) -> int:
        return most_output_tokens(self.model, self.request.parameters.max_tokens)


@frozen_dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A valid request that awaits admission. Its record is kept for the dead letter, should our own code fail on it."""

    queued: QueuedRequest
    record: ReceivedRecord

    @property
    def claim(self) -> Claim:
        return self.queued.claim


@frozen_dataclass(frozen=True, slots=True)
class CancelCommand:
    """A valid cancel. ``claim`` is of the cancel's own record, ``tenant`` that of its topic, ``requested_at_ms`` its
    broker timestamp."""

    claim: Claim
    tenant: str
    request_id: str
    requested_at_ms: int

    def concerns(self, queued: QueuedRequest) -> bool:
        """Whether it cancels this request: same tenant and id, and sent before the cancel. An id sent again after its
        cancel is a new request."""
        if (queued.tenant, queued.request_id) != (self.tenant, self.request_id):
            return False
        source = queued.source
        if (source.topic, source.partition) == self.claim.partition:
            return source.offset < self.claim.offset
        return queued.submitted_at_ms <= self.requested_at_ms
