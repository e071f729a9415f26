"""The port of engines: items in, one outcome per item out, each reported when it is known."""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Code
from fairlane.records import (
    MOST_INPUT_ITEMS,
    Message,
    ModelVersion,
    Output,
    Parameters,
    Passage,
    RequestInput,
    TokenUsage,
)
from inference_consumers.engines.remote.endpoints import ModelEndpoints


@frozen_dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds on one run. Tokens are the model's own."""

    max_batch_size: int
    max_batch_tokens: int
    max_context_tokens: int
    max_output_tokens: int


class SimulatedCost(msgspec.Struct, frozen=True):
    """Time and memory of the simulated engine: a batch takes ``batch_ms``, plus its tokens at the two rates. By default
    it takes no time at all: a measurement then covers everything but the engine."""

    prefill_tokens_per_s: float = math.inf
    decode_tokens_per_s: float = math.inf
    batch_ms: float = 0.0
    memory_tokens: int = 0
    """The longest prompt that fits; 0 means any."""

    def prefill_seconds(self, prompt_tokens: int) -> float:
        return self.batch_ms / 1000 + prompt_tokens / self.prefill_tokens_per_s


class EngineSpec(msgspec.Struct, frozen=True, tag=True):
    """Everything an engine is made from: its process reads no settings."""

    model: ModelVersion
    models_dir: str
    threads: int = 0
    """On a CPU; 0 is one per core."""
    device: str = "auto"
    """auto (the first GPU when there is one), cpu, cuda or cuda:N."""
    engine: str | None = None
    """Overrides the engine that models.yaml names: simulated."""
    simulated: SimulatedCost = SimulatedCost()
    allow_unsafe_weights: bool = False
    """Whether files may be loaded that can run any code."""
    endpoints: ModelEndpoints | None = None
    """Of an engine that only asks servers."""
    is_beside: bool = False
    """Whether others serve while it is loaded."""

    @property
    def path(self) -> Path:
        return Path(self.models_dir) / self.model.path

    @property
    def engine_name(self) -> str:
        return self.engine or self.model.engine

    @property
    def limits(self) -> EngineLimits:
        model = self.model
        return EngineLimits(
            model.max_batch_size, model.max_batch_tokens, model.max_context_tokens, model.max_output_tokens
        )

    def error(self, reason: str) -> "EngineLoadError":
        return EngineLoadError(f"{self.model.model}: {reason}")

    def no_room(self, reason: str) -> "NoRoomError":
        return NoRoomError(f"{self.model.model}: {reason}")


@frozen_dataclass(frozen=True, slots=True)
class EngineItem:
    """One item of a batch; ``task`` is one of the engine's tasks. ``item_id`` is unique among running items.

    ``max_prompt_tokens`` is the tenant's own bound on its prompts, beside the context of the model. ``history`` is what
    was said in the conversation before the input, oldest first; ``is_turn`` says that there is a conversation.
    ``time_left_s`` is the time to its deadline when it was given to the engine; None: it has no deadline.
    """

    item_id: str
    task: str
    input: RequestInput
    parameters: Parameters
    passages: tuple[Passage, ...] = ()
    max_prompt_tokens: int | None = None
    history: tuple[Message, ...] = ()
    is_turn: bool = False
    time_left_s: float | None = None


class Success(msgspec.Struct, frozen=True, tag=True):
    """The item's answer and what it cost."""

    output: Output
    usage: TokenUsage
    finish_reason: str | None = None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The item failed by itself; its neighbours in the batch did not.

    ``transient`` says that another try may succeed: the reason was not in the item. ``untried`` says that no try was
    made: what the engine needs is away or busy.
    """

    code: Code
    message: str
    field: str | None = None
    transient: bool = False
    untried: bool = False


NOT_FINITE = Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")


class CancelledItem(msgspec.Struct, frozen=True, tag=True):
    """The item was cancelled; ``usage`` is its cost until then."""

    usage: TokenUsage


ItemOutcome = Success | Failure | CancelledItem


@frozen_dataclass(frozen=True, slots=True)
class RunCost:
    """Tokens that a run computed, in the model's tokens: those of the items, and those with padding."""

    useful_tokens: int = 0
    computed_tokens: int = 0


class RunObserver(Protocol):
    """Observer of a run. ``index`` is an item's position in the batch. All calls are cheap.

    An engine reports every item's outcome once, as soon as it is known, and before it the text of an item that streams
    (``parameters.stream``): the deltas of an item together are the text of its answer.
    """

    def text(self, index: int, delta: str) -> None:
        """More of an item's text; never empty, never half a character, never a part of a stop string."""

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        """An item is done."""

    def step(self) -> None:
        """Report progress, and pass on what was reported since the last step."""

    def is_cancelled(self, index: int) -> bool:
        """Whether an item is to be stopped; asked between steps."""


class Engine(Protocol):
    """One loaded model. ``run`` is called from one thread at a time and blocks until the batch is done."""

    @property
    def name(self) -> str:
        """Name of the engine in replies, e.g. ``torch-causal-lm``."""

    @property
    def limits(self) -> EngineLimits: ...

    def load(self) -> None:
        """Load the weights and warm up. Raises EngineLoadError when the model cannot be served."""

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item: ``observer.finished`` exactly once for each.

        An item that cannot be answered is a Failure; an exception means that the engine itself failed, on all items
        without an outcome. Raises TransientEngineError when another try may succeed.
        """

    def close(self) -> None: ...


class ContinuousEngine(Engine, Protocol):
    """An engine that schedules by itself: items join and leave while others run."""

    def join(self, batch: Sequence[EngineItem], observer: RunObserver) -> None:
        """Like ``run``, but returns at once; the observer is called from a thread of the engine's. A step follows the
        last outcome, and comes for a batch of nothing as well."""

    def cancel(self, item_ids: Collection[str]) -> None:
        """Stop these items now: each that runs or waits gets its outcome, CancelledItem. Others are ignored."""

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        """Have ``on_death`` called once, from any thread, when the engine can answer nothing any more: items without
        an outcome get none, and the process is to end."""

    def metrics(self) -> str:
        """The engine's own metrics, in the text format of Prometheus."""


@frozen_dataclass(frozen=True, slots=True)
class Problem:
    """Why a run ended before all its items did. ``error`` is the type of the exception: its text may quote a prompt."""

    error: str
    out_of_memory: bool = False
    transient: bool = False


class EngineMemory(msgspec.Struct, frozen=True):
    """What an engine's process and its children hold, in bytes of the machine's memory and of its GPU's.

    ``device_free_bytes`` is what the GPU has left; None without one. ``fills_device``: the engine took a fixed part of
    the GPU, whatever the size of its model.
    """

    main_bytes: int = 0
    device_bytes: int = 0
    device_free_bytes: int | None = None
    fills_device: bool = False


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served, and trying again would not help; the process ends. ``no_room``: it may help when
    there is more memory. ``may_pass``: it may help later, since the source of its files is away."""

    message: str
    no_room: bool = False
    may_pass: bool = False


class EngineLoadError(Exception):
    """The model cannot be loaded: names the model, the path and the reason."""


class NoRoomError(EngineLoadError):
    """There is not enough memory for the model."""


class TransientEngineError(Exception):
    """The run failed for a reason that may pass, which lies in none of its items."""


class EngineGoneError(Exception):
    """The engine ended earlier, by ``__cause__``, and can answer nothing any more: not the fault of the items it is
    given now."""


class Outcomes:
    """Collects outcomes. A second outcome of an item raises RuntimeError."""

    def __init__(self, cancelled: Collection[int] = ()) -> None:
        self.by_index: dict[int, ItemOutcome] = {}
        self.texts: dict[int, list[str]] = {}
        self.steps = 0
        self.cancelled = set(cancelled)

    def text(self, index: int, delta: str) -> None:
        if index in self.by_index:
            raise RuntimeError(f"text of item {index} after its outcome")
        self.texts.setdefault(index, []).append(delta)

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        if index in self.by_index:
            raise RuntimeError(f"a second outcome of item {index}")
        self.by_index[index] = outcome

    def step(self) -> None:
        self.steps += 1

    def is_cancelled(self, index: int) -> bool:
        return index in self.cancelled


def run_batch(engine: Engine, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
    """The outcomes of a batch, in its order. Raises what the engine raises, RuntimeError when one is missing."""
    outcomes = Outcomes()
    engine.run(batch, outcomes)
    if len(outcomes.by_index) != len(batch):
        raise RuntimeError(f"the engine gave {len(outcomes.by_index)} outcomes for {len(batch)} items")
    return [outcomes.by_index[index] for index in range(len(batch))]


def try_once(engine: Engine, items: Sequence[EngineItem], spec: EngineSpec) -> None:
    """Run some items after loading: weights that load may still be of a kind that this engine cannot run. Closes the
    engine and raises EngineLoadError when one fails."""
    try:
        outcomes = run_batch(engine, items)
    except Exception as error:
        engine.close()
        raise spec.error(f"{spec.path}: the first run failed: {type(error).__name__}: {error}") from error
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            engine.close()
            raise spec.error(f"{spec.path}: the first run failed: {outcome.message}")


def wrong_task(item: EngineItem) -> Failure:
    return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")


def wrong_texts(texts: Sequence[str] | None, name: str) -> Failure | None:
    """Failure if there are too few or too many texts or documents; ``name`` is the field of the input."""
    if not texts:
        return Failure(Code.INVALID, "at least one is needed", f"input.{name}")
    if len(texts) > MOST_INPUT_ITEMS:
        return Failure(Code.INVALID, f"{len(texts)} items are more than {MOST_INPUT_ITEMS}", f"input.{name}")
    return None


def over_allowance(item: EngineItem, tokens: int, name: str = "prompt") -> Failure | None:
    """Failure if the input has more tokens than its tenant's limit."""
    if item.max_prompt_tokens is None or tokens <= item.max_prompt_tokens:
        return None
    message = f"the {name} has {tokens} tokens; the tenant's limit is {item.max_prompt_tokens}"
    return Failure(Code.CONTEXT_TOO_LONG, message, "input")


def computed_tokens(outcome: ItemOutcome) -> int:
    """Tokens computed for an item by an engine without padding. Cached tokens are not counted; 0 for a failure."""
    if isinstance(outcome, Failure):
        return 0
    usage = outcome.usage
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
