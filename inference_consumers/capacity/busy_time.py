"""Busy time of engines, whose runs may overlap: its sum, and throughput over windows of it. Pure."""

from dataclasses import dataclass, field

from fairlane.records import TokenUsage, WorkItem
from inference_consumers.batching.received_work import ModelKey
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


@dataclass(slots=True)
class BusyTime:
    """Counts every moment once, however many runs an engine has under way. One thread at a time."""

    _counted_up_to_ms: dict[ModelKey, int] = field(default_factory=dict)

    def passed_s(self, key: ModelKey, now_ms: int, *, running: bool) -> float:
        """Seconds that this engine ran since the call before. It runs something from now on, or rests.

        A clock that was set back takes nothing away.
        """
        before_ms = self._counted_up_to_ms.pop(key, now_ms)
        if running:
            self._counted_up_to_ms[key] = now_ms
        return max(0, now_ms - before_ms) / 1_000
