"""A request that was admitted and waits for its turn."""

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


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRequest:
    """A request with what was decided about it so far.

    ``claim`` is the record that it settles, ``source`` where the request stood first: they differ for work that a
    consumer handed back. ``cost_tokens`` is prompt plus twice the expected output, estimated; ``quota_tokens`` is what
    it was when the request came, which is what its quota was asked for, and 0 for work that was handed back.
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
    """How its passages were found; None until they were looked for."""
    history: tuple[Message, ...] = ()
    history_use: HistoryUse | None = None
    """How what was said before was found; None until it was looked for."""
    cache: str = CacheMode.NONE
    """Which answers given before may answer it, and whether its own is kept."""
    handed_back: int = 0
    quota_tokens: int = 0
    expected_tokens: int = 0
    """The part of ``prompt_tokens`` that is still to be looked up, as far as it is expected."""
    trace_headers: TraceHeaders = ()
    max_prompt_tokens: int | None = None
    """What its tenant allows; the engine counts, with the model's tokenizer."""
    encoded: tuple[InferenceRequest, bytes] | None = None
    """A request and the Avro body it was read from; it saves encoding it again as long as it is ``request`` itself."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def seen(self) -> tuple[str, str, SourceCoordinate]:
        """What a duplicate index knows it by."""
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
