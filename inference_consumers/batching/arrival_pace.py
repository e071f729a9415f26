"""Arrival rate of items, and whether another one is expected in time. Pure."""

from dataclasses import dataclass

KEPT_PER_ARRIVAL = 0.7


@dataclass(slots=True)
class ArrivalPace:
    """The gaps between one model's arrivals, averaged, older ones counting less."""

    _last_at_ms: int | None = None
    _gap_ms: float | None = None

    def arrived(self, at_ms: int) -> None:
        """An item did."""
        if self._last_at_ms is not None:
            gap_ms = max(0, at_ms - self._last_at_ms)
            past_ms = gap_ms if self._gap_ms is None else self._gap_ms
            self._gap_ms = KEPT_PER_ARRIVAL * past_ms + (1 - KEPT_PER_ARRIVAL) * gap_ms
        self._last_at_ms = at_ms

    def worth_waiting_ms(self, timeout_ms: int) -> int:
        """How long an item should wait for company that has so long to come: not at all when none is to be expected."""
        return timeout_ms if self._gap_ms is None or self._gap_ms < timeout_ms else 0
