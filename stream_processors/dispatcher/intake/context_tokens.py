"""How much is going to be added to requests before they run: passages, and what was said before. Pure."""

from collections import OrderedDict

from fairlane.records import InferenceRequest

_FALL = 0.1
"""How fast what is expected follows when less is added than was."""


class ContextTokens:
    """Learns from what was added to a tenant's requests of one kind: with retrieval, in a conversation, or both.

    It rises at once and falls slowly: what is expected too low goes out beyond the window, what is expected too high
    waits a little. Remembers ``max_entries`` kinds, dropping the one taught longest ago. O(1). Not for several threads.
    """

    def __init__(self, max_entries: int = 20_000) -> None:
        self._max_entries = max_entries
        self._expected: OrderedDict[tuple[str, bool, bool], float] = OrderedDict()

    def expected(self, tenant: str, request: InferenceRequest) -> int:
        """Tokens that will be added to this one; 0 if nothing is, or as long as nothing is known."""
        key = _kind(tenant, request)
        return round(self._expected.get(key, 0.0)) if any(key[1:]) else 0

    def learn(self, tenant: str, request: InferenceRequest, tokens: int) -> None:
        """So much was added to this one."""
        key = _kind(tenant, request)
        if not any(key[1:]):
            return
        before = self._expected.pop(key, 0.0)
        self._expected[key] = tokens if tokens >= before else before + _FALL * (tokens - before)
        if len(self._expected) > self._max_entries:
            self._expected.popitem(last=False)

    def __len__(self) -> int:
        """How many kinds are remembered."""
        return len(self._expected)


def _kind(tenant: str, request: InferenceRequest) -> tuple[str, bool, bool]:
    return tenant, request.retrieval is not None, request.conversation_id is not None
