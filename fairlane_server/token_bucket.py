"""Arithmetic of token buckets, in Python and, for Redis, in Lua.

Over any interval a bucket admits at most its rate times the interval plus its capacity.

Prepend it to the script. ``clock`` takes the time as an argument; an empty one means the server's clock, which all
processes share.
"""

import math
from collections import OrderedDict
from typing import Generic, TypeVar

LONGEST_WAIT_MS = 366 * 86_400_000
"""Upper bound of every retry hint, so that it fits the fields that carry it."""

# Fraction of the capacity. Levels add up over days: rounding errors must not cost a request.
_TOLERANCE = 1e-9

LevelT = TypeVar("LevelT")


def refilled(capacity: float, per_ms: float, amount: float, elapsed_ms: float) -> float:
    return min(capacity, amount + elapsed_ms * per_ms)


def wait_ms(capacity: float, per_ms: float, missing: float, clock_is_behind_ms: int) -> int:
    """Milliseconds until ``missing`` tokens have been added; 0 if none are missing."""
    if missing <= capacity * _TOLERANCE:
        return 0
    # Rounded up, so that a request sent then is not refused by a rounding error.
    return clock_is_behind_ms + math.floor(missing / per_ms) + 1


def full_in_ms(capacity: float, per_ms: float, amount: float) -> int:
    return math.ceil((capacity - amount) / per_ms) if amount < capacity else 0


class BucketLevels(Generic[LevelT]):
    """Levels of the owners whose buckets are not full; beyond ``most`` owners the least recently active one has full
    buckets again. Every operation is O(1). Not thread-safe."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # ``sweep`` looks at the first two: it drops the full ones and moves the others to the back.
        self._levels: OrderedDict[str, tuple[LevelT, int]] = OrderedDict()

    def get(self, owner: str) -> LevelT | None:
        """The level of this owner; None when its buckets are full."""
        known = self._levels.get(owner)
        return None if known is None else known[0]

    def put(self, owner: str, level: LevelT, full_at_ms: int) -> None:
        """Store a level; from ``full_at_ms`` on it may be forgotten."""
        self._levels[owner] = (level, full_at_ms)
        if self._most is not None:
            self._levels.move_to_end(owner)
            while len(self._levels) > self._most:
                self._levels.popitem(last=False)

    def sweep(self, now_ms: int) -> None:
        """Drop some owners whose buckets are full by now. Call it at least as often as ``put``."""
        for _ in range(min(2, len(self._levels))):
            owner, (_, full_at_ms) = next(iter(self._levels.items()))
            if full_at_ms > now_ms and self._most is not None:
                # With a limit the order is least recently active, which must not change here.
                return
            if full_at_ms <= now_ms:
                del self._levels[owner]
            else:
                self._levels.move_to_end(owner)

    def __len__(self) -> int:
        return len(self._levels)


BUCKET_FUNCTIONS = """
local function clock(given)
  local now = tonumber(given)
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return now
end
local function refilled(capacity, per_ms, amount, elapsed_ms)
  return math.min(capacity, amount + elapsed_ms * per_ms)
end
local function wait_ms(capacity, per_ms, missing, clock_is_behind_ms)
  if missing <= capacity * 1e-9 then
    return 0
  end
  return clock_is_behind_ms + math.floor(missing / per_ms) + 1
end
local function full_in_ms(capacity, per_ms, amount)
  if amount >= capacity then
    return 0
  end
  return math.ceil((capacity - amount) / per_ms)
end
"""
