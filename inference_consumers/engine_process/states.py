"""State of a consumer's engines: which are loaded, and which have room. Changed under the consumer's lock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inference_consumers.batching.received_work import ModelKey
from inference_consumers.engine_process.failures import EngineEnd
from inference_consumers.engine_process.runs import ActiveRuns
from inference_consumers.engine_process.stall_detection import RunWatch, StallTimeouts
from inference_consumers.engines.protocol import EngineItem


class Host(Protocol):
    """The process of one engine, as the consumer needs it; see
    :class:`inference_consumers.engine_process.host.EngineHost`."""

    @property
    def key(self) -> ModelKey: ...

    @property
    def life(self) -> int: ...

    def run(self, run_id: int, items: Sequence[EngineItem], life: int) -> None: ...

    def cancel(self, run_id: int, indexes: Sequence[int]) -> None: ...

    @property
    def is_stopped(self) -> bool: ...

    @property
    def cpu_ms(self) -> int | None: ...

    def kill(self, end: EngineEnd) -> None: ...

    def close(self, timeout_s: float) -> None: ...


@dataclass(slots=True)
class EngineState:
    """State of one engine. ``life`` numbers its process; ``name`` is its name in replies; ``watch`` is set while it
    runs something."""

    host: Host
    max_items: int
    max_tokens: int
    name: str = "none"
    is_continuous: bool = False
    is_loaded: bool = False
    has_been_loaded: bool = False
    life: int = 0
    watch: RunWatch | None = None

    def started(self, now_ms: int, patience: StallTimeouts, predicted_s: float | None) -> None:
        if self.watch is None:
            self.watch = RunWatch(patience, now_ms, predicted_s)
        else:
            self.watch.predicted_s = max(self.watch.predicted_s or 0.0, predicted_s or 0.0)

    def progressed(self, now_ms: int) -> None:
        if self.watch is not None:
            self.watch.progressed(now_ms)


@dataclass(slots=True)
class EngineStates:
    """Micro-batch engines run one batch at a time, whatever the number of models: they share a device. A continuous one
    takes items as long as it has room."""

    by_key: Mapping[ModelKey, EngineState]
    runs: ActiveRuns = field(default_factory=ActiveRuns)

    def __iter__(self) -> Iterator[EngineState]:
        return iter(self.by_key.values())

    def ended(self, key: ModelKey) -> None:
        if not self.runs.of(key):
            self.by_key[key].watch = None

    @property
    def lost(self) -> list[str]:
        """Models whose engines were loaded and are not any more: their processes died and are being started again."""
        return [state.host.key[0] for state in self if state.has_been_loaded and not state.is_loaded]

    def runnable(self) -> set[ModelKey]:
        busy = any(not self.by_key[run.model_key].is_continuous for run in self.runs)
        return {key for key, state in self.by_key.items() if state.is_loaded and self._has_room(key, state, busy=busy)}

    def behind(self, key: ModelKey) -> set[ModelKey]:
        """Models that wait for this one's engine while it runs something."""
        if self.by_key[key].is_continuous:
            return {key}
        return {other for other, state in self.by_key.items() if not state.is_continuous}

    def idle(self, keys: Iterable[ModelKey]) -> set[ModelKey]:
        return {key for key in keys if not self.runs.of(key)}

    def room(self, key: ModelKey) -> tuple[int, int]:
        state, runs = self.by_key[key], self.runs.of(key)
        items = state.max_items - sum(len(run.open) for run in runs)
        return items, state.max_tokens - sum(run.cost_tokens for run in runs)

    def _has_room(self, key: ModelKey, state: EngineState, *, busy: bool) -> bool:
        if not state.is_continuous:
            return not busy
        items, tokens = self.room(key)
        return items > 0 and tokens > 0 and not any(run.alone for run in self.runs.of(key))
