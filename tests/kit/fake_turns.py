"""Conversations for tests of what is done with them; the real store has tests of its own."""

import asyncio
from dataclasses import dataclass, field

from fairlane.records import Message
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn, StoredTurns, turn_tokens


def turn_id(number: int) -> str:
    """The request of turn number so much."""
    return f"00000000-0000-4000-8000-{number:012d}"


def turn(number: int, question: str = "", answer: str = "", *more: Message) -> StoredTurn:
    """Turn number so much of a conversation: a question and an answer."""
    messages = (Message("user", question or f"question {number}"), *more)
    said = answer or f"answer {number}"
    return StoredTurn(turn_id(number), messages, said, turn_tokens(messages, said), number)


@dataclass
class FakeTurns:
    """Remembers what the test says; whatever is in ``failures`` is raised instead, once each, and while ``hangs`` is
    set nothing is answered."""

    conversations: dict[tuple[str, str], list[StoredTurn]] = field(default_factory=dict)
    coming: list[tuple[str, str, StoredTurn]] = field(default_factory=list)
    """Recorded one by one, each after one more question was answered."""
    failures: list[Exception] = field(default_factory=list)
    hangs: bool = False
    asked: list[tuple[str, str, str | None, int]] = field(default_factory=list)
    """Tenant, conversation, turn that has to be there, and most tokens of each."""
    timeouts_s: list[float] = field(default_factory=list)
    reads: int = 0
    """How many of them turns were read for."""

    def add(self, tenant: str, conversation_id: str, *turns: StoredTurn) -> None:
        self.conversations.setdefault((tenant, conversation_id), []).extend(turns)

    async def turns(
        self, tenant: str, conversation_id: str, after: str | None, max_tokens: int, timeout_s: float
    ) -> StoredTurns:
        found = await self._answer(tenant, conversation_id, after, max_tokens, timeout_s)
        self.reads += 1
        return found

    async def turns_with(
        self, tenant: str, conversation_id: str, after: str, max_tokens: int, timeout_s: float
    ) -> StoredTurns | None:
        found = await self._answer(tenant, conversation_id, after, max_tokens, timeout_s)
        if not found.has_after:
            return None
        self.reads += 1
        return found

    async def _answer(
        self, tenant: str, conversation_id: str, after: str | None, max_tokens: int, timeout_s: float
    ) -> StoredTurns:
        self.asked.append((tenant, conversation_id, after, max_tokens))
        self.timeouts_s.append(timeout_s)
        if self.failures:
            raise self.failures.pop(0)
        if self.hangs:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        said = list(self.conversations.get((tenant, conversation_id), []))
        if self.coming:
            self.add(self.coming[0][0], self.coming[0][1], self.coming.pop(0)[2])
        kept: list[StoredTurn] = []
        for one in reversed(said[-MOST_TURNS:]):
            if sum(turn.tokens for turn in kept) >= max_tokens:
                break
            kept.insert(0, one)
        there = after is None or any(one.request_id == after for one in said)
        return StoredTurns(tuple(kept), len(kept) == len(said), there)
