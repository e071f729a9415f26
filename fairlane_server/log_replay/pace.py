"""Pace of a replay, its room for more copies, and when it is over. Pure: counts and ``now_s`` in, decisions out."""

from collections import deque
from dataclasses import dataclass, field

from fairlane_server.log_replay.plan import ARMS

WINDOW_S = 60.0
PATIENCE_S = 30.0
"""Without a new result for so long, what is missing is counted exactly: an erasure removes results, and their copies
would count as under way for ever."""
_MOST_MARKS = 256


@dataclass(slots=True)
class RecentRate:
    """Rate of a growing count over the last minute."""

    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))

    def mark(self, count: int, now_s: float) -> None:
        """The count at this time. A count that fell, as after an erasure, starts anew."""
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now_s, count))
        while len(self._marks) > 1 and self._marks[1][0] < now_s - WINDOW_S:
            self._marks.popleft()

    @property
    def per_s(self) -> float | None:
        """None before two marks."""
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return None
        return (self._marks[-1][1] - self._marks[0][1]) / (self._marks[-1][0] - self._marks[0][0])


@dataclass(slots=True)
class OutstandingCopies:
    """Copies without a result.

    Attributes:
        results: that there are.
        written_off: copies that will never have one.
    """

    results: int = 0
    written_off: int = 0
    _changed_s: float | None = None

    def seen(self, results: int, now_s: float) -> None:
        """So many results are there now."""
        if results != self.results or self._changed_s is None:
            self.results, self._changed_s = results, now_s

    def of(self, copied: int) -> int:
        """How many there are if so many requests are copied."""
        return max(0, ARMS * copied - self.results - self.written_off)

    def is_to_be_counted(self, copied: int, now_s: float) -> bool:
        """Whether what is missing must be counted exactly: nothing has come for a while, though something should."""
        return self.of(copied) > 0 and self._changed_s is not None and now_s - self._changed_s >= PATIENCE_S

    def counted(self, copied: int, missing: int, now_s: float) -> None:
        """So many copies have no result and may still get one."""
        self.written_off = max(0, ARMS * copied - self.results - missing)
        self._changed_s = now_s
