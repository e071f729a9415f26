"""Engine that ranks with static embeddings: a table of token vectors, microseconds a text, no torch.

The smaller model of an encoder under load. It does no embeddings: vectors of another model cannot be compared with
those that a tenant has stored.
"""

from collections.abc import Sequence

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput, TokenUsage
from fairlane_server.retrieval.embedder import EmbedderError
from fairlane_server.retrieval.static_embedder import WEIGHTS, StaticEmbedder
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineItem,
    EngineLimits,
    EngineSpec,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    Success,
    over_allowance,
    try_once,
    wrong_task,
    wrong_texts,
)


class StaticRankingEngine:
    """``static-ranking``: does rank. The score of a document is the cosine of its vector and the query's."""

    name = "static-ranking"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._embedder: StaticEmbedder | None = None

    @property
    def limits(self) -> EngineLimits:
        return self._spec.limits

    def load(self) -> None:
        """Load the table. Raises EngineLoadError."""
        path = self._spec.path
        weights = path / WEIGHTS
        if not weights.is_file():
            raise self._spec.error(f"{path} holds no model ({weights.name} is missing); prepare the models first")
        try:
            self._embedder = StaticEmbedder(path)
        except EmbedderError as error:
            raise self._spec.error(f"{weights} cannot be loaded: {error}") from error
        warm_up = EngineItem(
            "warm-up", Task.RANK, RequestInput(query="hello", documents=("hello again",)), Parameters()
        )
        try_once(self, (warm_up,), self._spec)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is an item."""
        if self._embedder is None:
            raise self._spec.error("not loaded")
        tokens = 0
        for index, item in enumerate(batch):
            if observer.is_cancelled(index):
                outcome: ItemOutcome = CancelledItem(TokenUsage())
            else:
                outcome = self._ranked(item, self._embedder)
            if isinstance(outcome, Success):
                tokens += outcome.usage.prompt_tokens
            observer.finished(index, outcome)
            observer.step()
        return RunCost(useful_tokens=tokens, computed_tokens=tokens)

    def close(self) -> None:
        self._embedder = None

    def _ranked(self, item: EngineItem, embedder: StaticEmbedder) -> Success | Failure:
        query, documents = item.input.query, item.input.documents or ()
        if item.task != Task.RANK:
            return wrong_task(item)
        if wrong := wrong_texts(documents, "documents"):
            return wrong
        if query is None:
            return Failure(Code.INVALID, "a query is needed", "input.query")
        texts = (query, *documents)
        counts = embedder.count_tokens(texts)
        most = self.limits.max_context_tokens
        for number, count in enumerate(counts):
            if count > most:
                field = f"input.documents[{number - 1}]" if number else "input.query"
                return Failure(Code.CONTEXT_TOO_LONG, f"the text has {count} tokens; the context holds {most}", field)
        if failure := over_allowance(item, sum(counts), "input"):
            return failure
        # A text without tokens has the zero vector, and a score of 0.
        vectors = embedder.embed(texts)
        scores = tuple(map(float, vectors[1:] @ vectors[0]))
        return Success(Output(scores=scores), TokenUsage(prompt_tokens=sum(counts)))
