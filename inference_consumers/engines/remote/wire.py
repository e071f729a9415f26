"""What an interface of model servers has to do for the engine, and what the interfaces share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlane.outcomes import Code, Task
from fairlane.records import Parameters, RequestInput, TokenUsage
from fairlane_server.text import clean_text, estimated_tokens
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineSpec,
    Failure,
    ItemOutcome,
    over_allowance,
    wrong_texts,
)
from inference_consumers.engines.remote.connection import EndpointConnection

Emit = Callable[[str], None]
"""Passes on a piece of an answer's text."""


class RemoteRequest(Protocol):
    """One item, prepared to be sent to any endpoint."""

    @property
    def spent(self) -> TokenUsage:
        """Tokens so far."""

    async def ask(self, connection: EndpointConnection, began: Callable[[], None], emit: Emit) -> ItemOutcome:
        """Send it and read the answer. ``began`` is called, perhaps often, once an answer comes. Raises as the
        connection."""


class ServerWire(Protocol):
    """One interface of model servers."""

    @property
    def name(self) -> str: ...

    @property
    def tasks(self) -> frozenset[Task]: ...

    def load(self) -> None:
        """Read the model's folder. Raises EngineLoadError."""

    async def check(self, connection: EndpointConnection) -> None:
        """Raises EndpointFailedError unless the endpoint serves the model."""

    def prepare(self, item: EngineItem) -> RemoteRequest | Failure:
        """From the item, whose task is one of the engine's."""

    def trials(self) -> Sequence[EngineItem]:
        """One item for each task of the model."""


@dataclass(frozen=True, slots=True)
class TextsCall:
    """Texts to embed; for a ranking the query comes first."""

    task: str
    texts: tuple[str, ...]

    def estimated_tokens_of(self, texts: Sequence[str]) -> int:
        return sum(map(estimated_tokens, texts))


def texts_call(item: EngineItem) -> TextsCall | Failure:
    """Of an item to embed or to rank. The tenant's limit applies to the estimate of its tokens."""
    given = item.input
    is_ranking = item.task == Task.RANK
    texts, name = (given.documents, "documents") if is_ranking else (given.texts, "texts")
    if wrong := wrong_texts(texts, name):
        return wrong
    if is_ranking and given.query is None:
        return Failure(Code.INVALID, "a query is needed", "input.query")
    all_texts = tuple(map(clean_text, ((given.query or "",) if is_ranking else ()) + (texts or ())))
    if failure := over_allowance(item, sum(map(estimated_tokens, all_texts)), "input"):
        return failure
    return TextsCall(item.task, all_texts)


def grouped(texts: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), most):
        yield texts[start : start + most]


def trial_items(spec: EngineSpec) -> list[EngineItem]:
    """One for each task of the model, for the wire to replace those that need more than texts."""
    given = {
        Task.EMBED: RequestInput(texts=("hello", "hello again")),
        Task.RANK: RequestInput(query="hello", documents=("hello again",)),
    }
    return [EngineItem("trial", task, given.get(Task(task), RequestInput()), Parameters()) for task in spec.model.tasks]
