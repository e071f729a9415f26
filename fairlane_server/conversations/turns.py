"""Conversation turns, and the port to the store that keeps them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fairlane.outcomes import HistoryReason
from fairlane.records import HistoryUse, Message
from fairlane_server.text import reserved_tokens

MOST_TURNS = 32
"""Most turns of a conversation that go into one prompt."""
SYSTEM = "system"
SPOKEN = frozenset({"user", "assistant"})
"""Roles of earlier turns that a model is given."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """Messages that one request added to its conversation, oldest first, and the answer. ``tokens`` of both are
    estimated; ``replied_at_ms`` is when the reply was written, since the epoch."""

    request_id: str
    messages: tuple[Message, ...]
    answer: str
    tokens: int
    replied_at_ms: int


@dataclass(frozen=True, slots=True)
class StoredTurns:
    """The newest turns of a conversation, oldest first. ``is_whole``: no older turn was left out; ``has_after``: the
    required turn is recorded, or none was required."""

    turns: tuple[StoredTurn, ...] = ()
    is_whole: bool = True
    has_after: bool = True


class TurnStore(Protocol):
    """Reads conversations."""

    async def turns(
        self, tenant: str, conversation_id: str, after: str | None, max_tokens: int, timeout_s: float
    ) -> StoredTurns:
        """Read the newest MOST_TURNS turns, without older ones once newer ones have ``max_tokens`` in all. ``after`` is
        the request id of a turn that should be recorded by now. Raises StoreError, TimeoutError."""

    async def turns_with(
        self, tenant: str, conversation_id: str, after: str, max_tokens: int, timeout_s: float
    ) -> StoredTurns | None:
        """Like ``turns`` if the turn ``after`` is recorded; else None, without reading any turn."""


def turn_tokens(messages: Iterable[Message], answer: str) -> int:
    return reserved_tokens(answer) + sum(reserved_tokens(message.content) for message in messages)


def said_before(history: Iterable[Message]) -> tuple[Message, ...]:
    """Earlier turns as a model is given them. They give no instructions: messages of other roles are dropped."""
    return tuple(message for message in history if message.role in SPOKEN)


def with_history(messages: Sequence[Message], history: Iterable[Message]) -> tuple[Message, ...]:
    """The messages of a request and the earlier turns, as a model is given them: those behind the leading system
    messages of the request."""
    first = next((index for index, message in enumerate(messages) if message.role != SYSTEM), len(messages))
    return (*messages[:first], *said_before(history), *messages[first:])


def newest_half(history: Sequence[Message]) -> tuple[Message, ...]:
    """The newer half of the turns, whole: each begins with a user message. Empty for a single turn."""
    begins = [index for index, message in enumerate(history) if message.role == "user" or index == 0]
    kept = len(begins) // 2
    return tuple(history[begins[-kept] :]) if kept else ()


def shortened_use(use: HistoryUse | None, before: Sequence[Message], kept: Sequence[Message]) -> HistoryUse | None:
    """The history use when only ``kept`` of the messages ``before`` is used; an earlier reason for gaps is
    preserved."""
    if use is None or len(kept) == len(before):
        return use
    reason = (use.reason or HistoryReason.SHORTENED) if kept else HistoryReason.NO_ROOM
    return replace(use, messages=len(kept), reason=reason)
