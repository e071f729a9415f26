"""Calls that wait for the process of a check: which go together, and which have waited too long. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall

MOST_CALLS = 4_096
"""Waiting. A consumer's prefetch holds less work than that."""

MOST_CALLS_TOGETHER = 32
MOST_CHARACTERS_TOGETHER = 65_536
"""Of one question; a longer text goes alone."""

_LOOKED_AT = 256

Done = Callable[[Answers | CheckFailure], None]


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call, when it came, and until when it is worth asking. ``alone``: it was in a question that failed."""

    call: CheckCall
    done: Done
    came_at_ms: int
    ends_at_ms: int
    alone: bool = False

    @property
    def characters(self) -> int:
        return sum(map(len, self.call.texts))


@dataclass(slots=True)
class CallQueue:
    """First come, first served, but for calls with the same context, which go along, up to ``most_together``. For one
    thread at a time."""

    most_together: int = MOST_CALLS_TOGETHER
    _waiting: deque[QueuedCall] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST_CALLS

    def add(self, call: QueuedCall) -> None:
        self._waiting.append(call)

    def again(self, calls: Sequence[QueuedCall]) -> None:
        """Calls of a question that failed: each is asked alone, before the others."""
        for one in reversed(calls):
            one.alone = True
            self._waiting.appendleft(one)

    def next(self) -> list[QueuedCall]:
        """Remove the calls to ask together; none if nothing waits."""
        if not self._waiting:
            return []
        first = self._waiting.popleft()
        taken, characters = [first], first.characters
        if first.alone:
            return taken
        kept: list[QueuedCall] = []
        for _ in range(min(len(self._waiting), _LOOKED_AT)):
            one = self._waiting.popleft()
            fits = len(taken) < self.most_together and characters + one.characters <= MOST_CHARACTERS_TOGETHER
            if fits and not one.alone and one.call.context == first.call.context:
                taken.append(one)
                characters += one.characters
            else:
                kept.append(one)
        self._waiting.extendleft(reversed(kept))
        return taken

    def take_late(self, now_ms: int, longest_wait_ms: int) -> list[QueuedCall]:
        """Remove the calls that waited for longer than that, or past their end."""
        late = [one for one in self._waiting if one.ends_at_ms <= now_ms or now_ms - one.came_at_ms > longest_wait_ms]
        if late:
            gone = set(map(id, late))
            self._waiting = deque(one for one in self._waiting if id(one) not in gone)
        return late

    def wait_from(self, now_ms: int) -> None:
        """The check is loaded: the wait of all calls begins now."""
        for one in self._waiting:
            one.came_at_ms = now_ms

    def take_all(self) -> list[QueuedCall]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
