"""Queue of one model in the micro-batcher, with what was learned about its engine. Pure."""

from dataclasses import dataclass, field

from inference_consumers.batching.arrival_pace import ArrivalPace
from inference_consumers.batching.heaps import Entry, ModelLines, Standing
from inference_consumers.batching.length_buckets import PaddingRecord
from inference_consumers.batching.limits import SafeSize
from inference_consumers.batching.priority_pick import PriorityPick
from inference_consumers.batching.run_times import RunTimes
from inference_consumers.batching.size import BatchSize

_EARLY = 1.25
"""Latest starts are reckoned with so many times the predicted time: half of all runs take longer than predicted."""


@dataclass(slots=True)
class ModelQueue:
    """What waits for a model, and what is known of it."""

    lines: ModelLines
    times: RunTimes = field(default_factory=RunTimes)
    safe: SafeSize = field(default_factory=SafeSize)
    padding: PaddingRecord = field(default_factory=PaddingRecord)
    pace: ArrivalPace = field(default_factory=ArrivalPace)
    turns: PriorityPick = field(default_factory=PriorityPick)
    """Of a continuous engine, item by item."""
    _sizes: dict[int, BatchSize] = field(default_factory=dict)

    def size_for(self, cost_tokens: float) -> BatchSize:
        """That of items of like cost, to a factor of 4: throughput is compared between batches of the same kind."""
        return self._sizes.setdefault(max(1, round(cost_tokens)).bit_length() // 2, BatchSize())

    def predicted_ms(self, cost_tokens: int) -> float:
        return 1_000 * self.times.predicted_s(cost_tokens)

    def latest_start_ms(self, entry: Entry) -> int:
        """When it must start at the latest to finish in time, alone."""
        return int(entry.deadline_at_ms - _EARLY * self.predicted_ms(entry.cost_tokens))

    def most_urgent(self, other_than: Entry | None = None) -> tuple[int, Entry] | None:
        """The latest start that comes first, and whose it is. Of like items it is that with the first deadline."""
        urgent: tuple[int, Entry] | None = None
        for cell in self.lines.cells:
            entry = cell.soonest.first()
            if entry is None or entry is other_than:
                continue
            start_ms = self.latest_start_ms(entry)
            if urgent is None or start_ms < urgent[0]:
                urgent = start_ms, entry
        return urgent

    def judge(self, now_ms: int) -> None:
        """Tell who can still finish in time from who cannot."""
        for cell in self.lines.cells:
            while (entry := cell.soonest.first()) is not None:
                if now_ms + self.predicted_ms(entry.cost_tokens) <= entry.deadline_at_ms:
                    break
                self.lines.restand(entry, Standing.HOPELESS)
            while (entry := cell.latest.first()) is not None and now_ms <= self.latest_start_ms(entry):
                self.lines.restand(entry, Standing.HOPEFUL)
