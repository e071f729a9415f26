"""What was said in a conversation, turn by turn, and the seam to whatever keeps it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fairlane.outcomes import HistoryReason
from fairlane.records import HistoryUse, Message
from fairlane_server.text import room_of

MOST_TURNS = 32
"""Of a conversation that go into one prompt."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request added to its conversation, and what it was answered.

    Attributes:
        request_id: of the request.
        messages: what was asked, oldest first.
        answer: the text of the reply.
        tokens: of all of that, estimated.
        replied_at_ms: when the reply was written, since the epoch.
    """

    request_id: str
    messages: tuple[Message, ...]
    answer: str
    tokens: int
    replied_at_ms: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The newest turns of a conversation, oldest first.

    Attributes:
        turns: as many as were asked for, or all there are.
        is_whole: nothing older was left out.
        has_after: the turn that had to be there is recorded; so it is when there was none.
    """

    turns: tuple[Turn, ...] = ()
    is_whole: bool = True
    has_after: bool = True


class TurnStore(Protocol):
    """Reads conversations."""

    async def turns(
        self, tenant: str, conversation_id: str, after: str | None, max_tokens: int, timeout_s: float
    ) -> Turns:
        """The newest MOST_TURNS turns, without those that only older ones of more than ``max_tokens`` follow.

        Args:
            tenant: whose conversation it is; another tenant's of the same name is not seen.
            conversation_id: its name.
            after: the request id of a turn that should be recorded by now.
            max_tokens: as soon as the newest turns have so many, older ones are left out.
            timeout_s: it ends within this time.

        Raises fairlane_server.store_error.StoreError, TimeoutError.
        """

    async def turns_with(
        self, tenant: str, conversation_id: str, after: str, max_tokens: int, timeout_s: float
    ) -> Turns | None:
        """The same once the turn ``after`` is recorded. Until then None, and no turn is read to find that out."""


def turn_tokens(messages: Iterable[Message], answer: str) -> int:
    """What a turn counts as."""
    return room_of(answer) + sum(room_of(message.content) for message in messages)


def newest_half(history: Sequence[Message]) -> tuple[Message, ...]:
    """The newer half of the turns, whole: each begins with a message of the user. Of one turn nothing."""
    begins = [index for index, message in enumerate(history) if message.role == "user" or index == 0]
    kept = len(begins) // 2
    return tuple(history[begins[-kept] :]) if kept else ()


def use_of_less(use: HistoryUse | None, before: Sequence[Message], kept: Sequence[Message]) -> HistoryUse | None:
    """How a history was found of which only so much is shown after all; why it had gaps already is not forgotten."""
    if use is None or len(kept) == len(before):
        return use
    reason = (use.reason or HistoryReason.SHORTENED) if kept else HistoryReason.NO_ROOM
    return replace(use, messages=len(kept), reason=reason)
