"""Calls that wait for the process of a check, and the pieces of their texts that it is asked about together. Pure.

One process looks at the texts of all tenants. A question to it holds no more than it looks at in a moment, by its
measured speed: a call is asked about in as many questions as its texts need, a long text in pieces. The tenants take
turns, a question each.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference_consumers.guardrails.check import Finding, Processed, QuestionSize
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.spans import joined, next_start, shifted

MOST_CALLS = 4_096
"""Waiting, half of them of one tenant. A consumer's prefetch holds less work than that."""

TEXT_COST = 100
"""Of looking at a text, however short, in characters. ``pii`` and ``prompt_injection`` take for a sentence what they
take for twice as many characters of a long text."""

LEAST_ROOM = 1_000
"""Of a question, however slow the process is: smaller pieces would be little more than their overlap."""

_KEPT_PER_QUESTION = 0.9

Done = Callable[[Answers | CheckFailure], None]


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call, when it came, and until when it is worth asking."""

    tenant: str
    call: CheckCall
    done: Done
    came_at_ms: int
    ends_at_ms: int
    is_over: bool = False
    """``done`` was called; what is found from then on is dropped."""
    _text: int = 0
    """The text to ask about next, by its place, and where in it."""
    _start: int = 0
    _unanswered: int = 0
    """Pieces that were asked about, or will be once more."""
    _answers: dict[int, list[Sequence[Finding] | Processed]] = field(default_factory=dict)
    """Of the pieces of each text."""

    @property
    def is_asked(self) -> bool:
        """Whether each text was asked about to its end."""
        return self._text >= len(self.call.texts)

    def next_piece(self, room: int, overlap: int | None) -> "Piece | None":
        """Remove the next piece to ask about, with a cost of at most ``room``; None if none fits. Without an
        ``overlap`` a text is not cut."""
        number, start = self._text, self._start
        text = self.call.texts[number]
        end = len(text)
        if end - start + TEXT_COST > room:
            if overlap is None or room < LEAST_ROOM:
                return None
            end = start + room - TEXT_COST
            self._start = next_start(text, end, overlap)
        else:
            self._text, self._start = number + 1, 0
        self._unanswered += 1
        return Piece(self, number, start, text[start:end])

    def answered(self, piece: "Piece", answer: Sequence[Finding] | Processed) -> Answers | None:
        """Add the answer to a piece. Returns the answers to all texts when they are complete."""
        if piece.start and not isinstance(answer, Processed):
            answer = [shifted(one, piece.start) for one in answer]
        self._answers.setdefault(piece.number, []).append(answer)
        self._unanswered -= 1
        if self._unanswered or not self.is_asked:
            return None
        return [_together(self._answers[number]) for number in range(len(self.call.texts))]


@dataclass(slots=True, eq=False)
class Piece:
    """A text of a call, or a part of it. ``alone``: it was in a question that failed, and is asked about once more, by
    itself."""

    of: QueuedCall
    number: int
    """The place of its text in the call."""
    start: int
    text: str
    alone: bool = False

    @property
    def cost(self) -> int:
        """Of looking at it, in characters."""
        return len(self.text) + TEXT_COST


@dataclass(slots=True)
class CallQueue:
    """Round robin over the tenants. A turn is a question, filled with the tenant's calls in their order; calls of the
    next tenants go along if they fit into what is left of it. For one thread at a time."""

    size: QuestionSize
    _calls: dict[str, deque[QueuedCall]] = field(default_factory=dict)
    """Those that are not yet asked about to their end. The next turn is that of the first tenant."""
    _again: deque[Piece] = field(default_factory=deque)

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def is_full(self, tenant: str) -> bool:
        """Whether it takes no more calls of this tenant."""
        return len(self) >= MOST_CALLS or len(self._calls.get(tenant, ())) >= MOST_CALLS // 2

    def add(self, call: QueuedCall) -> None:
        self._calls.setdefault(call.tenant, deque()).append(call)

    def again(self, pieces: Sequence[Piece]) -> None:
        """Pieces of a question that failed: each is asked about alone, before anything else."""
        for piece in pieces:
            piece.alone = True
            self._again.append(piece)

    def next(self, room: int) -> list[Piece]:
        """Remove the pieces to ask about together, with a cost of at most ``room``, or one text that is longer and
        cannot be cut. Empty if nothing waits."""
        while self._again:
            piece = self._again.popleft()
            if not piece.of.is_over:
                return [piece]
        if not self._calls:
            return []
        first, *others = self._calls
        pieces: list[Piece] = []
        left = self._fill(pieces, first, max(LEAST_ROOM, min(room, self.size.characters)), is_its_turn=True)
        for tenant in others:
            if left < TEXT_COST:
                break
            left = self._fill(pieces, tenant, left, is_its_turn=False)
        if first in self._calls:
            self._calls[first] = self._calls.pop(first)
        return pieces

    def remove(self, call: QueuedCall) -> None:
        """What was not yet asked of a call is not worth asking."""
        calls = self._calls.get(call.tenant)
        if calls is not None and call in calls:
            calls.remove(call)
            if not calls:
                del self._calls[call.tenant]

    def late(self, now_ms: int, absent_since_ms: int | None, longest_wait_ms: int) -> list[QueuedCall]:
        """The calls that are past their end, and those that waited for longer than that for a process that is absent
        since then."""
        return [
            call
            for call in self._unfinished()
            if call.ends_at_ms <= now_ms
            or (absent_since_ms is not None and now_ms - max(call.came_at_ms, absent_since_ms) > longest_wait_ms)
        ]

    def take_all(self) -> list[QueuedCall]:
        taken = self._unfinished()
        self._again.clear()
        self._calls.clear()
        return taken

    def _unfinished(self) -> list[QueuedCall]:
        """Each call of which something is still to be asked, once: those with pieces to ask about again first."""
        waiting = (call for calls in self._calls.values() for call in calls)
        return list(dict.fromkeys((*(piece.of for piece in self._again), *waiting)))

    def _fill(self, pieces: list[Piece], tenant: str, room: int, *, is_its_turn: bool) -> int:
        """Move what fits of a tenant's calls to ``pieces``. Returns the room that is left."""
        calls = self._calls[tenant]
        while calls and len(pieces) < self.size.texts:
            call = calls[0]
            if pieces and call.call.context != pieces[0].of.call.context:
                break
            overlap = self.size.overlap if is_its_turn else None
            # The first of a turn is asked about even if it is too long and cannot be cut.
            piece = call.next_piece(sys.maxsize if overlap is None and not pieces else room, overlap)
            if piece is None:
                break
            pieces.append(piece)
            room -= piece.cost
            if call.is_asked:
                calls.popleft()
        if not calls:
            del self._calls[tenant]
        return room


@dataclass(slots=True)
class Speed:
    """Measured speed of a process, from sums of cost and of time in which older questions count less. Their ratio
    weighs every second alike: a mean of speeds would let a question of one word count like one of thousands."""

    _cost: float = 0.0
    _ms: float = 0.0
    _proven: float = 0.0
    """The largest cost of the latest questions that were answered."""

    def answered(self, cost: int, ms: int) -> None:
        """A question was answered after this time."""
        self._add(cost, ms)
        self._proven = max(cost, _KEPT_PER_QUESTION * self._proven)

    def given_up(self, cost: int, ms: int) -> None:
        """A question was not answered within this time."""
        self._add(cost, ms)
        self._proven = 0.0

    def room(self, ms: float) -> int:
        """The cost of a question that takes this time, or twice the cost of those before if that is less: a short text
        that was easy says little about a long one."""
        return round(min(2 * self._proven, self._cost / self._ms * ms)) if self._ms else 0

    def _add(self, cost: int, ms: int) -> None:
        self._cost = _KEPT_PER_QUESTION * self._cost + cost
        self._ms = _KEPT_PER_QUESTION * self._ms + max(1, ms)


def _together(pieces: Sequence[Sequence[Finding] | Processed]) -> Sequence[Finding] | Processed:
    """The answer to a text; parts of one that was cut share characters."""
    if len(pieces) == 1:
        return pieces[0]
    return joined(one for findings in pieces if not isinstance(findings, Processed) for one in findings)
