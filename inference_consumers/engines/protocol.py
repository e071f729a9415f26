"""What an engine is to the consumer: items in, one outcome per item out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlane.outcomes import Code
from fairlane.records import Output, Parameters, Passage, RequestInput, TokenUsage


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one run may hold. Tokens are the model's own."""

    max_batch_size: int
    max_batch_tokens: int
    max_context_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One item of a batch; ``task`` is one of the engine's tasks."""

    item_id: str
    task: str
    input: RequestInput
    parameters: Parameters
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True, slots=True)
class Success:
    """The item's answer and what it cost."""

    output: Output
    usage: TokenUsage
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The item failed by itself; its neighbours in the batch did not."""

    code: Code
    message: str
    field: str | None = None


ItemOutcome = Success | Failure


class Engine(Protocol):
    """One loaded model. ``run`` is called from one thread at a time and blocks until the batch is done."""

    @property
    def name(self) -> str:
        """How the engine names itself in replies, e.g. ``torch-causal-lm``."""

    @property
    def limits(self) -> EngineLimits: ...

    def load(self) -> None:
        """Load the weights and warm up. Raises EngineLoadError when the model cannot be served."""

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Answer every item, in order; never longer or shorter than the batch.

        An item that cannot be answered is a Failure; an exception means that the engine itself failed.
        """

    def close(self) -> None: ...


class EngineLoadError(Exception):
    """The model cannot be loaded: names the model, the path and the reason."""
