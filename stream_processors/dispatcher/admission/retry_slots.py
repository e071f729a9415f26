"""Slots for refused requests: a time to come back at which there is room. Pure.

Under sustained overload a time to retry that is the end of the present backlog is the same for all refused requests:
they return together, and most are refused again. So each refused request gets a slot of its own, one after another at
the rate at which its tenant is served, as a virtual queue. Who returns at its slot may use the whole latency target;
others only half of it while slots are outstanding. Nothing is kept free for those who do not return: below half of the
target anybody is admitted.

A sender that retries rarely uses the same request id, so a request is recognised by its content.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import isfinite

from fairlane_server.admission_rule import LEAST_RETRY_MS, MOST_RETRY_MS

GRACE_MS = 5_000
"""A slot counts for this long after its time: senders round up, and one that comes later is one of many again."""

FRESH_PART = 0.5
"""Part of the latency target for requests without a slot, while slots are outstanding."""

Backlog = tuple[str, str, str]
"""Pool, tenant, class."""


@dataclass(slots=True)
class _Slots:
    due_ms: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)
    """By content, in order of time."""
    next_ms: float = 0.0
    """Time of the next free slot."""


class RetrySlots:
    """The outstanding slots of all backlogs, ``max_slots`` at most; beyond it the time to retry is that of the caller,
    and gives no right. Each operation is O(1) on average. For one thread."""

    def __init__(self, max_slots: int = 100_000) -> None:
        self._max_slots = max_slots
        self._backlogs: dict[Backlog, _Slots] = {}
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
        if not slots.due_ms:
            return 1.0
        due_ms = slots.due_ms.get(content)
        return 1.0 if due_ms is not None and now_ms >= due_ms else FRESH_PART

    def admitted(self, backlog: Backlog, content: Hashable) -> None:
        """Give the slot of an admitted request back, if it has one."""
        slots = self._backlogs.get(backlog)
        if slots is not None and slots.due_ms.pop(content, None) is not None:
            self._count -= 1

    def refused(self, backlog: Backlog, content: Hashable, wait_ms: float, service_ms: float, now_ms: int) -> float:
        """Give a refused request a slot, and return the time until it: at least ``wait_ms``, and ``service_ms`` (what
        its tenant needs for one such request) after the slot before. One that came too early keeps its slot.

        Beyond MOST_RETRY_MS there are no slots.
        """
        slots = self._backlogs.setdefault(backlog, _Slots())
        self._expire(slots, now_ms)
        known_ms = slots.due_ms.get(content)
        if known_ms is not None and known_ms > now_ms:
            return max(LEAST_RETRY_MS, known_ms - now_ms)
        due_ms = max(now_ms + wait_ms, slots.next_ms)
        if due_ms - now_ms >= MOST_RETRY_MS or not isfinite(service_ms):
            return MOST_RETRY_MS
        if known_ms is None and self._count >= self._max_slots:
            return due_ms - now_ms
        slots.next_ms = due_ms + service_ms
        self._count += slots.due_ms.pop(content, None) is None
        slots.due_ms[content] = due_ms
        return due_ms - now_ms

    def expire(self, now_ms: int) -> None:
        """Forget all that were not used. Call it periodically. O(backlogs)."""
        for backlog, slots in tuple(self._backlogs.items()):
            self._expire(slots, now_ms)
            if not slots.due_ms and slots.next_ms <= now_ms:
                del self._backlogs[backlog]

    def _expire(self, slots: _Slots, now_ms: int) -> None:
        while slots.due_ms and next(iter(slots.due_ms.values())) + GRACE_MS < now_ms:
            slots.due_ms.popitem(last=False)
            self._count -= 1

    def __len__(self) -> int:
        return self._count
