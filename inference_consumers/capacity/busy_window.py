"""Throughput of a continuous engine, whose runs overlap, over windows of busy time. Pure."""

from dataclasses import dataclass, field

from fairlane.records import TokenUsage, WorkItem
from inference_consumers.capacity.measurement import MeasuredRun
from inference_consumers.engine_process.runs import measured

WINDOW_MS = 1_000


@dataclass(slots=True)
class BusyWindow:
    """Adds up until a second of busy time is full, or the engine rests. One thread at a time."""

    _active_items: int = 0
    _since_ms: int = 0
    _busy_ms: int = 0
    _item_ms: int = 0
    _served: list[tuple[WorkItem, TokenUsage]] = field(default_factory=list)

    def served(self, item: WorkItem, usage: TokenUsage) -> None:
        self._served.append((item, usage))

    def changed(self, now_ms: int, active_items: int) -> MeasuredRun | None:
        """So many items run from now on. Returns what the window says when it is full; a new one begins then."""
        if self._active_items > 0:
            passed_ms = max(0, now_ms - self._since_ms)
            self._busy_ms += passed_ms
            self._item_ms += passed_ms * self._active_items
        self._active_items, self._since_ms = active_items, now_ms
        if self._busy_ms == 0 or not self._served or (self._busy_ms < WINDOW_MS and active_items > 0):
            return None
        items = max(1, round(self._item_ms / self._busy_ms))
        run = measured(self._served, items, self._busy_ms / 1_000)
        self._busy_ms = self._item_ms = 0
        self._served = []
        return run
