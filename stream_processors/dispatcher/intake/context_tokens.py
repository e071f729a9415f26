"""Expected tokens that enrichment adds to requests: passages and history. Pure."""

from collections import OrderedDict

from fairlane.records import InferenceRequest

_FALL = 0.1
"""Weight of a new value below the expected one."""


class ContextTokens:
    """Learns the tokens added to a tenant's requests of one kind: with retrieval, in a conversation, or both.

    Rises at once and falls slowly: an estimate that is too low exceeds the dispatch window, one that is too high only
    waits a little. Keeps ``max_entries`` kinds and drops the least recently updated. O(1). For one thread.
    """

    def __init__(self, max_entries: int = 20_000) -> None:
        self._max_entries = max_entries
        self._expected: OrderedDict[tuple[str, bool, bool], float] = OrderedDict()

    def expected(self, tenant: str, request: InferenceRequest) -> int:
        """Expected tokens for this request; 0 without enrichment, or while unknown."""
        key = _kind(tenant, request)
        return round(self._expected.get(key, 0.0)) if any(key[1:]) else 0

    def learn(self, tenant: str, request: InferenceRequest, tokens: int) -> None:
        """Learn the tokens added to this request."""
        key = _kind(tenant, request)
        if not any(key[1:]):
            return
        before = self._expected.pop(key, 0.0)
        self._expected[key] = tokens if tokens >= before else before + _FALL * (tokens - before)
        if len(self._expected) > self._max_entries:
            self._expected.popitem(last=False)

    def __len__(self) -> int:
        """Number of kinds kept."""
        return len(self._expected)


def _kind(tenant: str, request: InferenceRequest) -> tuple[str, bool, bool]:
    return tenant, request.retrieval is not None, request.conversation_id is not None
