"""A consumer's engines: which are loaded, which have room, their running batches, and what those have reported so far.

Changed under the consumer's lock.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fairlane.outcomes import Code
from fairlane.records import TokenUsage, WorkItem
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.capacity.measurement import MeasuredRun, measured
from inference_consumers.engine_process.failures import EngineEnd
from inference_consumers.engine_process.stall_detection import RunWatch, StallTimeouts
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineMemory,
    Failure,
    ItemOutcome,
    LoadFailed,
    Success,
)

_ENGINE_PROBLEMS = frozenset({Code.POISON, Code.ENGINE_ERROR, Code.OVERLOADED})


@dataclass(slots=True)
class ActiveRun:
    """Items that an engine runs together. ``alone``: no other run of it is active."""

    run_id: int
    model_key: ModelKey
    work: tuple[ReceivedWork, ...]
    started_at_ms: int
    alone: bool = False
    open: set[int] = field(default_factory=set)
    """Places of the items without an outcome."""
    is_yielding: bool = False
    """Its items were told to end, so that requests need not wait for copies; they run again later."""
    _engine_failed: bool = False
    _served: list[tuple[WorkItem, TokenUsage]] = field(default_factory=list)
    _next_chunk: dict[int, int] = field(default_factory=dict)
    _text_at_ms: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = set(range(len(self.work)))

    @property
    def is_copies(self) -> bool:
        """Whether it runs copies for evaluation, which are in no run with requests."""
        return self.work[0].is_copy

    @property
    def open_work(self) -> list[ReceivedWork]:
        return [self.work[index] for index in sorted(self.open)]

    def is_by_itself(self, *, continuous: bool) -> bool:
        """Whether the engine ran only one item since this run began; ``continuous`` says which kind of engine it is."""
        return len(self.work) == 1 and (self.alone or not continuous)

    @property
    def cost_tokens(self) -> int:
        return sum(self.work[index].item.cost_tokens for index in self.open)

    @property
    def all_cost_tokens(self) -> int:
        return sum(work.item.cost_tokens for work in self.work)

    def finish(self, index: int, outcome: ItemOutcome) -> bool:
        """Note an item's outcome; False when it has one, or there is no such item."""
        if index not in self.open:
            return False
        self.open.remove(index)
        if isinstance(outcome, Success):
            self._served.append((self.work[index].item, outcome.usage))
        elif isinstance(outcome, Failure) and (outcome.transient or outcome.code in _ENGINE_PROBLEMS):
            self._engine_failed = True
        return True

    def has_streamed(self, index: int) -> bool:
        return index in self._next_chunk

    def next_chunk(self, index: int) -> int:
        number = self._next_chunk.get(index, 0)
        self._next_chunk[index] = number + 1
        return number

    def text_came(self, index: int, now_ms: int) -> int | None:
        """Milliseconds since the item's text before; None for its first."""
        before_ms = self._text_at_ms.get(index)
        self._text_at_ms[index] = now_ms
        return None if before_ms is None else now_ms - before_ms

    def all_failed(self, problem: bool) -> bool | None:
        """Whether the engine failed on everything; None when it did on nothing but also had nothing good to run.
        ``problem`` says that the run ended with one."""
        if self._served:
            return False
        return True if problem or self._engine_failed else None

    def measured(self, seconds: float) -> MeasuredRun:
        """What the run says about the engine's speed. Only what succeeded counts as served, by the tokens that the
        engine counted; what it counted none for (a classification) by its estimate, as the dispatcher charges it."""
        return measured(self._served, len(self.work), seconds)


@dataclass(slots=True)
class ActiveRuns:
    """Every run under way."""

    _by_id: dict[int, ActiveRun] = field(default_factory=dict)
    _last_id: int = 0

    def start(self, key: ModelKey, work: Sequence[ReceivedWork], now_ms: int, *, alone: bool = False) -> ActiveRun:
        """Begin a run of this work and count one more run for each item."""
        self._last_id += 1
        counted = tuple(replace(one, runs=one.runs + 1) for one in work)
        run = ActiveRun(self._last_id, key, counted, now_ms, alone)
        self._by_id[run.run_id] = run
        return run

    def get(self, run_id: int) -> ActiveRun | None:
        return self._by_id.get(run_id)

    def end(self, run_id: int) -> ActiveRun | None:
        return self._by_id.pop(run_id, None)

    def end_all(self, key: ModelKey) -> list[ActiveRun]:
        ended = [run for run in self._by_id.values() if run.model_key == key]
        for run in ended:
            del self._by_id[run.run_id]
        return ended

    def of(self, key: ModelKey) -> list[ActiveRun]:
        return [run for run in self._by_id.values() if run.model_key == key]

    def __iter__(self) -> Iterator[ActiveRun]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def items(self) -> int:
        return sum(len(run.open) for run in self._by_id.values())

    @property
    def cost_tokens(self) -> int:
        return sum(run.cost_tokens for run in self._by_id.values())


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

    @property
    def held_bytes(self) -> int: ...

    def kill(self, end: EngineEnd) -> None: ...

    def close(self, timeout_s: float) -> None: ...


@dataclass(slots=True)
class EngineState:
    """State of one engine. ``life`` numbers its process; ``name`` is its name in replies; ``watch`` is set while it
    runs something. ``failure``: it could not be loaded. ``is_hidden``: it is to be unloaded, and not reported any more;
    ``is_leaving``: it takes nothing new either."""

    host: Host
    max_items: int
    max_tokens: int
    name: str = "none"
    is_continuous: bool = False
    is_loaded: bool = False
    has_been_loaded: bool = False
    memory: EngineMemory = field(default_factory=EngineMemory)
    failure: LoadFailed | None = None
    is_hidden: bool = False
    is_leaving: bool = False
    life: int = 0
    watch: RunWatch | None = None
    has_run_requests: bool = False
    has_run_copies: bool = False

    @property
    def only_copies(self) -> bool:
        """Whether it has run nothing but copies for evaluation: its failures are no failures of the consumer."""
        return self.has_run_copies and not self.has_run_requests

    def started(self, now_ms: int, timeouts: StallTimeouts, predicted_s: float | None) -> None:
        if self.watch is None:
            self.watch = RunWatch(timeouts, now_ms, predicted_s)
        else:
            self.watch.predicted_s = max(self.watch.predicted_s or 0.0, predicted_s or 0.0)

    def progressed(self, now_ms: int) -> None:
        if self.watch is not None:
            self.watch.progressed(now_ms)


@dataclass(slots=True)
class EngineStates:
    """Micro-batch engines run one batch at a time, whatever the number of models: they share a device. A continuous one
    takes items as long as it has room. Copies for evaluation wait for all runs, and hold up only their own engine.
    Versions come and go (``inference_consumers/versions``)."""

    by_key: dict[ModelKey, EngineState] = field(default_factory=dict)
    runs: ActiveRuns = field(default_factory=ActiveRuns)

    def __iter__(self) -> Iterator[EngineState]:
        return iter(self.by_key.values())

    def serves(self, key: ModelKey) -> bool:
        """Whether this consumer takes work for the version: its engine is loaded, or is being started again."""
        state = self.by_key.get(key)
        return state is not None and state.has_been_loaded and not state.is_leaving and state.failure is None

    @property
    def loaded(self) -> tuple[ModelKey, ...]:
        """Versions that can run now or are being started again, and are to stay."""
        return tuple(key for key, state in self.by_key.items() if self.serves(key) and not state.is_hidden)

    def ended(self, key: ModelKey) -> None:
        if not self.runs.of(key):
            self.by_key[key].watch = None

    def about_to_start(self, key: ModelKey) -> None:
        """A run begins: what was watched is over, unless something of it is still open."""
        if not any(run.open for run in self.runs.of(key)):
            self.by_key[key].watch = None

    @property
    def lost(self) -> list[str]:
        """Models whose engines were loaded and are not any more: their processes died and are being started again."""
        return [
            state.host.key[0]
            for state in self
            if state.has_been_loaded and not state.is_loaded and not state.only_copies and state.failure is None
        ]

    def runnable(self, *, for_copies: bool = False) -> set[ModelKey]:
        """Models whose engines take a run. One whose items all have outcomes is as good as over: its end is reported
        while the next one is on its way."""
        busy = any(
            run.open and not self.by_key[run.model_key].is_continuous and (for_copies or not run.is_copies)
            for run in self.runs
        )
        ready = {key: state for key, state in self.by_key.items() if state.is_loaded and not state.is_leaving}
        return {key for key, state in ready.items() if self._has_room(key, state, busy=busy)}

    def copies_in_the_way(self, waiting_requests: int) -> list[ActiveRun]:
        """Runs of copies that keep an engine from requests which wait, or run in a micro-batch: micro-batches, and a
        copy that a continuous engine runs alone."""
        batches = [
            run
            for run in self.runs
            if run.open and (not self.by_key[run.model_key].is_continuous or (run.alone and run.is_copies))
        ]
        if not waiting_requests and all(run.is_copies for run in batches):
            return []
        return [run for run in batches if run.is_copies and not run.is_yielding]

    def behind(self, key: ModelKey) -> set[ModelKey]:
        """Models that wait for this one's engine while it runs something."""
        if self.by_key[key].is_continuous or all(run.is_copies for run in self.runs.of(key)):
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
            return not busy and not any(run.open for run in self.runs.of(key))
        items, tokens = self.room(key)
        return items > 0 and tokens > 0 and not any(run.alone for run in self.runs.of(key))


def engine_items(work: Sequence[ReceivedWork], now_ms: int) -> list[EngineItem]:
    return [
        EngineItem(
            item_id=one.item.request.request_id,
            task=one.item.request.task,
            input=one.item.request.input,
            parameters=one.item.request.parameters,
            passages=one.item.passages,
            max_prompt_tokens=one.item.max_prompt_tokens,
            history=one.item.history,
            is_turn=one.item.request.conversation_id is not None,
            time_left_s=(one.item.deadline_at_ms - now_ms) / 1_000,
        )
        for one in work
    ]
