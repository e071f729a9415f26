"""A work item in memory: its origin, and its history in this process."""

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailVerdict
from fairlane.ownership import Claim
from fairlane.records import WorkItem
from fairlane.trace_context import TraceHeaders

ModelKey = tuple[str, str]
"""Model name and version."""


@frozen_dataclass(frozen=True, slots=True)
class ReceivedWork:
    """A work item with the record it came from, and its history: engine runs so far, those that failed for a transient
    reason, those that ended with the engine's process, and of these the ones that only this item can have caused.
    ``shortened``: passages or turns were left out because the context was too long. ``verdicts`` are those of the
    guardrails so far; ``given`` is the item as it was received, if a guardrail changed it, else None."""

    claim: Claim
    item: WorkItem
    size_bytes: int
    received_at_ms: int
    original_key: bytes | None = None
    original_value: bytes = b""
    appended_at_ms: int = 0
    trace_headers: TraceHeaders = ()
    generation: int = 0
    """Of the group, when it was delivered: streamed text of an earlier generation is void."""
    runs: int = 0
    transient_failures: int = 0
    ends: int = 0
    lone_ends: int = 0
    shortened: bool = False
    verdicts: tuple[GuardrailVerdict, ...] = ()
    given: WorkItem | None = None

    @property
    def model_key(self) -> ModelKey:
        return self.item.request.model, self.item.model_version

    @property
    def request_id(self) -> str:
        return self.item.request.request_id

    @property
    def is_copy(self) -> bool:
        """Whether it runs for evaluation alone."""
        return self.item.evaluation is not None
