"""A valid request with the decisions made about it so far, and the same with its record before admission."""

from dataclasses import dataclass

from fairlane.outcomes import CacheMode
from fairlane.ownership import Claim
from fairlane.records import (
    HistoryUse,
    InferenceRequest,
    Message,
    ModelVersion,
    Passage,
    RetrievalUse,
    SourceCoordinate,
)
from fairlane.trace_context import TraceHeaders
from stream_processors.dispatcher.intake.received_record import ReceivedRecord


@dataclass(frozen=True, slots=True, eq=False)
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
    quota_tokens: int = 0
    expected_tokens: int = 0
    """The part of ``prompt_tokens`` expected from enrichment."""
    trace_headers: TraceHeaders = ()
    max_prompt_tokens: int | None = None
    """The tenant's bound, enforced by the consumer with the model's tokenizer."""
    encoded: tuple[InferenceRequest, bytes] | None = None
    """A request and the Avro body it was decoded from; reused for encoding while it is the same object as
    ``request``."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def seen(self) -> tuple[str, str, SourceCoordinate]:
        """Its entry in the duplicate index: tenant, request id, source."""
        return self.tenant, self.request.request_id, self.source

    @property
    def group(self) -> str:
        return self.request.group or ""

    @property
    def priority_class(self) -> str:
        return self.request.priority

    @property
    def model_name(self) -> str:
        return self.model.model


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A valid request that awaits admission. Its record is kept for the dead letter, should our own code fail on it."""

    queued: QueuedRequest
    record: ReceivedRecord

    @property
    def claim(self) -> Claim:
        return self.queued.claim
