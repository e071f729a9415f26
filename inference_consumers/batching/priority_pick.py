"""Weighted pick among the priorities. Pure.

Start-time fair queueing with one unit of service per turn (Goyal, Vin and Cheng, SIGCOMM 1996): each priority has a
tag, the virtual time at which its next turn begins, and a turn moves it on by a stride that is inverse to its weight.
The least tag is next; virtual time is the tag of the last turn. A priority that has work again starts at the larger of
its tag and virtual time: idle time earns no credit and cancels no debt.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import lcm

from fairlane.outcomes import Priority

PRIORITY_WEIGHTS: Mapping[str, int] = {Priority.HIGH: 8, Priority.NORMAL: 3, Priority.LOW: 1}

_LCM = lcm(*PRIORITY_WEIGHTS.values())
_STRIDES = {priority: _LCM // weight for priority, weight in PRIORITY_WEIGHTS.items()}


@dataclass(slots=True)
class PriorityPick:
    """Who had how many turns. One thread at a time."""

    _tags: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_WEIGHTS, 0))
    _virtual_time: int = 0
    _jumped: set[str] = field(default_factory=set)

    def next(self, present: Collection[str]) -> str:
        """Whose turn it is among the priorities that have something, at least one; changes nothing."""
        return min(
            (priority for priority in PRIORITY_WEIGHTS if priority in present),
            key=lambda priority: max(self._tags[priority], self._virtual_time),
        )

    def took(self, priority: str) -> None:
        self._virtual_time = max(self._tags[priority], self._virtual_time)
        self._tags[priority] = self._virtual_time + _STRIDES[priority]
        self._jumped.discard(priority)

    def may_jump(self, priority: str) -> bool:
        """Whether it may take a turn before it is due: once between two that are."""
        return priority not in self._jumped

    def jumped(self, priority: str) -> None:
        """It took its next turn early; the one after that is as much later."""
        self._tags[priority] = max(self._tags[priority], self._virtual_time) + _STRIDES[priority]
        self._jumped.add(priority)
