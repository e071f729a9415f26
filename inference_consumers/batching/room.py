"""Remaining room of a batch while it is formed. Pure."""

from dataclasses import dataclass, field

from inference_consumers.batching.heaps import Entry, Standing
from inference_consumers.batching.length_buckets import MAX_PADDING, PaddingRecord, Shape
from inference_consumers.batching.model_queue import RunTimes


@dataclass(slots=True)
class BatchRoom:
    """A batch in the making.

    Attributes:
        max_items: how many items it may have.
        max_tokens: what they may cost, padding included; the first one may cost more.
        now_ms: when it starts.
        times: how long it will take.
        padding: that of the batches before.
        done_by_ms: when it should be done, for the sake of somebody outside; None if nobody waits so.
    """

    max_items: int
    max_tokens: int
    now_ms: int
    times: RunTimes
    padding: PaddingRecord
    done_by_ms: int | None = None
    shape: Shape = field(default_factory=Shape)

    def take(self, entry: Entry) -> None:
        self.shape = self.shape.plus(entry.work)
        if entry.standing is Standing.HOPEFUL and (self.done_by_ms is None or entry.deadline_at_ms < self.done_by_ms):
            self.done_by_ms = entry.deadline_at_ms

    @property
    def is_full(self) -> bool:
        return self.shape.items >= self.max_items

    def has_place_for(self, entry: Entry, *, anyway: bool) -> bool:
        """Whether one more fits. ``anyway`` says that padding is no reason against it."""
        shape = self.shape.plus(entry.work)
        if shape.items > self.max_items or shape.padded_tokens > self.max_tokens:
            return False
        if not anyway and shape.padding_share(self.padding.weight) > MAX_PADDING:
            return False
        done_at_ms = self.now_ms + 1_000 * self.times.predicted_s(shape.padded_tokens)
        if self.done_by_ms is not None and done_at_ms > self.done_by_ms:
            return False
        return entry.standing is not Standing.HOPEFUL or done_at_ms <= entry.deadline_at_ms

    def is_worth_padding(self, group: Shape) -> bool:
        """Whether to take a whole group costs less in padding than to give it a run of its own. Not if it does not fit
        in whole: then that run is needed anyway. Nor if too much was padded already."""
        merged = self.shape.merged(group)
        if merged.items > self.max_items or merged.padded_tokens > self.max_tokens:
            return False
        more = merged.padding_tokens - self.shape.padding_tokens
        return self.padding.weight * more <= self.times.base_tokens and self.padding.allows(merged)
