"""When turns of conversations are old enough to be removed, and how many of them at a time. Pure."""

from dataclasses import dataclass

_INTERVAL_S = 60.0
_SOON_S = 1.0


@dataclass(slots=True)
class Retention:
    """Looks once a minute, and once a second while there is more to remove than was removed at once.

    Attributes:
        keep_s: age that turns reach.
        at_once: most turns of one removal, so that it holds nothing up.
    """

    keep_s: int
    at_once: int = 2_000
    _due_at: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether to look now; ``now`` is any clock that never goes back, in seconds."""
        return now >= self._due_at

    def before_ms(self, epoch_ms: int) -> int:
        """Turns that were answered before this are old, in milliseconds since the epoch."""
        return epoch_ms - 1_000 * self.keep_s

    def removed(self, count: int, now: float) -> None:
        """So many were removed just now."""
        self._due_at = now + (_SOON_S if count >= self.at_once else _INTERVAL_S)
