"""Busy time of engines; runs of a continuous engine overlap. Pure."""

from dataclasses import dataclass, field

from inference_consumers.batching.received_work import ModelKey


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
