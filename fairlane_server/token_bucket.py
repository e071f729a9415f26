"""The arithmetic of token buckets. Pure.

Over any interval a bucket lets through at most its rate times the interval plus what it holds when full.
"""

import math
from collections import OrderedDict
from typing import Generic, TypeVar

LONGEST_WAIT_MS = 366 * 86_400_000
"""Nobody is told to come back later than that, whatever a bucket says: a time must fit where it is told."""

# Part of a full bucket. Levels are fractions added up over days: what rounding loses must not cost a request.
_TOLERANCE = 1e-9

LevelT = TypeVar("LevelT")


def refilled(capacity: float, per_ms: float, amount: float, elapsed_ms: float) -> float:
    """What is in a bucket that held ``amount`` so long ago."""
    return min(capacity, amount + elapsed_ms * per_ms)


def wait_ms(capacity: float, per_ms: float, missing: float, clock_is_behind_ms: int) -> int:
    """How long until ``missing`` has flowed in; 0 if it is there."""
    if missing <= capacity * _TOLERANCE:
        return 0
    # One more than the whole milliseconds: who comes then is not turned away by a rounding.
    return clock_is_behind_ms + math.floor(missing / per_ms) + 1


def full_in_ms(capacity: float, per_ms: float, amount: float) -> int:
    """How long until a bucket with this amount is full."""
    return math.ceil((capacity - amount) / per_ms) if amount < capacity else 0


class Levels(Generic[LevelT]):
    """What is in the buckets of every owner of whom one is not full. Every operation is O(1). Not for several threads.

    Args:
        most: of how many owners at most; beyond it who asked least recently is forgotten, and has full buckets again.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # Each sweep looks at the two in front: it forgets the full ones and sends the others to the back.
        self._levels: OrderedDict[str, tuple[LevelT, int]] = OrderedDict()

    def get(self, owner: str) -> LevelT | None:
        """What is remembered of this owner; None if all is full."""
        known = self._levels.get(owner)
        return None if known is None else known[0]

    def put(self, owner: str, level: LevelT, full_at_ms: int) -> None:
        """Remember it; at ``full_at_ms`` and later there is nothing to remember."""
        self._levels[owner] = (level, full_at_ms)
        if self._most is not None:
            self._levels.move_to_end(owner)
            while len(self._levels) > self._most:
                self._levels.popitem(last=False)

    def sweep(self, now_ms: int) -> None:
        """Forget some of what is full by now. To be called with every ``put`` or more often."""
        for _ in range(min(2, len(self._levels))):
            owner, (_, full_at_ms) = next(iter(self._levels.items()))
            if full_at_ms > now_ms and self._most is not None:
                # Their order is who asked least recently.
                return
            if full_at_ms <= now_ms:
                del self._levels[owner]
            else:
                self._levels.move_to_end(owner)

    def __len__(self) -> int:
        return len(self._levels)
