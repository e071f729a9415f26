"""Running batches and what each has reported so far. Changed under the consumer's lock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fairlane.outcomes import Code
from fairlane.records import TokenUsage, WorkItem
from fairlane_server.admission_rule import cost_tokens
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.capacity.measurement import MeasuredRun
from inference_consumers.engines.protocol import EngineItem, Failure, ItemOutcome, Success

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
    _engine_failed: bool = False
    _served: list[tuple[WorkItem, TokenUsage]] = field(default_factory=list)
    _next_chunk: dict[int, int] = field(default_factory=dict)
    _text_at_ms: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = set(range(len(self.work)))

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

    @property
    def served(self) -> Sequence[tuple[WorkItem, TokenUsage]]:
        return self._served

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


def measured(served: Sequence[tuple[WorkItem, TokenUsage]], items: int, seconds: float) -> MeasuredRun:
    """Measured run: items at a time, those served, and the time taken."""
    return MeasuredRun(
        items=items,
        prompt_tokens=sum(usage.prompt_tokens for _, usage in served),
        completion_tokens=sum(usage.completion_tokens for _, usage in served),
        cost_tokens=sum(
            cost_tokens(usage.prompt_tokens, usage.completion_tokens) or item.cost_tokens for item, usage in served
        ),
        seconds=seconds,
    )


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


def engine_items(work: Sequence[ReceivedWork]) -> list[EngineItem]:
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
        )
        for one in work
    ]
