"""What waits between intake and dispatch, and the order in which it leaves. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fairlane.ownership import Claim
from fairlane.records import InferenceRequest, ModelVersion


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """An admitted request that waits for its turn."""

    claim: Claim
    tenant: str
    request: InferenceRequest
    model: ModelVersion
    reply_topic: str
    cost_tokens: int
    size_bytes: int
    submitted_at_ms: int
    admitted_at_ms: int
    deadline_at_ms: int
    trace_headers: tuple[tuple[str, bytes], ...] = ()


class WorkQueue(Protocol):
    """Decides who goes next."""

    def push(self, request: QueuedRequest) -> None: ...

    def pop(self, now_ms: int) -> QueuedRequest | None:
        """The request that goes next, expired or not; None when nothing may go now."""

    def take(self, claim: Claim) -> QueuedRequest | None:
        """Remove one request out of turn: it must be decided so that its partition is not blocked."""

    def discard(self, claims: Iterable[Claim]) -> None:
        """Forget requests whose partitions moved on; their new owner reads them again."""

    def claims(self) -> Iterable[Claim]: ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the requests that wait."""

    def __len__(self) -> int: ...


class ArrivalOrder:
    """First in, first out over all tenants."""

    def __init__(self) -> None:
        self._waiting: dict[Claim, QueuedRequest] = {}

    def push(self, request: QueuedRequest) -> None:
        self._waiting[request.claim] = request

    def pop(self, now_ms: int) -> QueuedRequest | None:  # noqa: ARG002 - part of the protocol
        for claim in self._waiting:
            return self._waiting.pop(claim)
        return None

    def take(self, claim: Claim) -> QueuedRequest | None:
        return self._waiting.pop(claim, None)

    def discard(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._waiting.pop(claim, None)

    def claims(self) -> Iterable[Claim]:
        return tuple(self._waiting)

    @property
    def size_bytes(self) -> int:
        return sum(request.size_bytes for request in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)


def estimate_cost_tokens(request: InferenceRequest, model: ModelVersion, input_bytes: int) -> int:
    """Prompt tokens plus twice the expected output tokens. Four bytes of text are about one token."""
    prompt_tokens = max(1, input_bytes // 4)
    if not model.max_output_tokens:
        return prompt_tokens
    expected = request.parameters.max_tokens or min(256, model.max_output_tokens)
    return prompt_tokens + 2 * expected
