"""Slots for refused requests: a time to come back at which there is room. Pure.

Under sustained overload a time to retry that is the end of the present backlog is the same for all refused requests:
they return together, and most are refused again. So each refused request gets a slot of its own, one after another at
the rate at which its tenant is served, as a virtual queue. Who returns at its slot may use the whole latency target;
others only half of it while slots are outstanding. Nothing is kept free for those who do not return: below half of the
target anybody is admitted.

Not all senders return. The part of the slots that are used is learned: slots stand closer by that part, and the less
they are used, the more of the target is left to others.

A sender that retries rarely uses the same request id, so a request is recognised by its content.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import isfinite

from fairlane_server.admission_rule import LEAST_RETRY_MS, MOST_RETRY_MS

GRACE_MS = 5_000
"""A slot counts for this long after its time: senders round up, and one that comes later is one of many again."""

FRESH_PART = 0.5
"""Part of the latency target for requests without a slot, while slots are outstanding and all of them are used."""

MOST_SLOTS = 100_000
MOST_OF_BACKLOG = MOST_SLOTS // 10
"""Slots of one backlog: a single flooder cannot use up all."""

_FURTHEST_MS = 2 * MOST_RETRY_MS
"""Of the next free slot."""
_RETURNS_GAIN = 0.05
_SOME_STAY_AWAY = 0.95
_OUTDATED_KEPT = 64

Backlog = tuple[str, str, str]
"""Pool, tenant, class."""


@dataclass(slots=True)
class _Slots:
    due_ms: dict[Hashable, float] = field(default_factory=dict)
    """By content."""
    by_time: list[tuple[float, int, Hashable]] = field(default_factory=list)
    """A heap of all slots, and of some that were used meanwhile: due, a number, content."""
    next_ms: float = 0.0
    """Time of the next free slot, if all of those before it are used."""
    returns: float = 1.0
    """Part of the slots that are used, lately."""

    def settle(self, *, used: bool) -> None:
        self.returns += _RETURNS_GAIN * (used - self.returns)


class RetrySlots:
    """The outstanding slots of all backlogs, ``max_slots`` at most, and ``max_of_backlog`` of one; beyond that the time
    to retry is computed alike, and gives no right. Each operation is O(log n) on average. For one thread."""

    def __init__(self, max_slots: int = MOST_SLOTS, max_of_backlog: int = MOST_OF_BACKLOG) -> None:
        self._max_slots, self._max_of_backlog = max_slots, max_of_backlog
        self._backlogs: dict[Backlog, _Slots] = {}
        self._numbers = count()
        self._count = 0

    def are_outstanding(self, backlog: Backlog) -> bool:
        """Whether this backlog has slots, or had some until the last call of ``expire``."""
        return backlog in self._backlogs

    def target_part(self, backlog: Backlog, content: Hashable, now_ms: int) -> float:
        """The part of its latency target that a request may use."""
        slots = self._backlogs.get(backlog)
        if slots is None:
            return 1.0
        self._expire(slots, now_ms)
        due_ms = slots.due_ms.get(content)
        if not slots.due_ms or (due_ms is not None and now_ms >= due_ms):
            return 1.0
        return 1.0 - (1.0 - FRESH_PART) * slots.returns

    def admitted(self, backlog: Backlog, content: Hashable) -> None:
        """Give the slot of an admitted request back, if it has one."""
        slots = self._backlogs.get(backlog)
        if slots is None or slots.due_ms.pop(content, None) is None:
            return
        self._count -= 1
        slots.settle(used=True)
        if len(slots.by_time) > 2 * len(slots.due_ms) + _OUTDATED_KEPT:
            slots.by_time = [slot for slot in slots.by_time if slots.due_ms.get(slot[2]) == slot[0]]
            heapify(slots.by_time)

    def refused(self, backlog: Backlog, content: Hashable, wait_ms: float, service_ms: float, now_ms: int) -> float:
        """Give a refused request a slot, and return the time until it: at least ``wait_ms``, and ``service_ms`` (what
        its tenant needs for one such request) after the slot before. One that came too early keeps its slot.

        There is none beyond MOST_RETRY_MS, and none while it is unknown what the tenant needs: then the time is that of
        the caller.
        """
        slots = self._backlogs.setdefault(backlog, _Slots())
        self._expire(slots, now_ms)
        known_ms = slots.due_ms.get(content)
        if known_ms is not None and known_ms > now_ms:
            return min(max(LEAST_RETRY_MS, known_ms - now_ms), MOST_RETRY_MS)
        if not isfinite(service_ms):
            return wait_ms
        spacing_ms, next_ms = min(service_ms, MOST_RETRY_MS) * slots.returns, slots.next_ms
        if slots.returns < _SOME_STAY_AWAY:
            # The slots before it were given when more were expected to return.
            others = len(slots.due_ms) - (known_ms is not None)
            next_ms = min(next_ms, now_ms + wait_ms + others * spacing_ms)
        due_ms = max(now_ms + wait_ms, next_ms)
        if due_ms - now_ms >= MOST_RETRY_MS:
            return max(wait_ms, MOST_RETRY_MS)
        slots.next_ms = due_ms + spacing_ms
        if known_ms is None and (self._count >= self._max_slots or len(slots.due_ms) >= self._max_of_backlog):
            return due_ms - now_ms
        self._count += known_ms is None
        slots.due_ms[content] = due_ms
        heappush(slots.by_time, (due_ms, next(self._numbers), content))
        return due_ms - now_ms

    def expire(self, now_ms: int) -> None:
        """Forget all that were not used. Call it periodically. O(backlogs)."""
        for backlog, slots in tuple(self._backlogs.items()):
            self._expire(slots, now_ms)
            if not slots.due_ms:
                del self._backlogs[backlog]

    def _expire(self, slots: _Slots, now_ms: int) -> None:
        if slots.next_ms - now_ms > _FURTHEST_MS:
            # The clock was set back.
            self._count -= len(slots.due_ms)
            slots.due_ms.clear()
            slots.by_time.clear()
            slots.next_ms = 0.0
        while slots.by_time and slots.by_time[0][0] + GRACE_MS < now_ms:
            due_ms, _, content = heappop(slots.by_time)
            if slots.due_ms.get(content) == due_ms:
                del slots.due_ms[content]
                self._count -= 1
                slots.settle(used=False)

    def __len__(self) -> int:
        return self._count
